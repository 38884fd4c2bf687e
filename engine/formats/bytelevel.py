"""The printable character that stands for each byte in byte-level BPE vocabularies.

The mapping is GPT-2's (`bytes_to_unicode` in openai/gpt-2 `src/encoder.py`): printable Latin-1
characters stand for themselves, the other 68 bytes for the characters from U+0100 on, in order.
"""

from __future__ import annotations

import functools


@functools.cache
def byte_characters() -> tuple[str, ...]:
    """256 characters: that of byte 0, of byte 1, and so on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, spare = [], 0x100
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(spare))
            spare += 1
    return tuple(characters)


@functools.cache
def character_bytes() -> dict[str, int]:
    """The reverse of `byte_characters`."""
    return {character: byte for byte, character in enumerate(byte_characters())}
