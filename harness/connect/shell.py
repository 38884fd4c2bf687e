"""How a command travels through whatever login shell a board has. Pure functions.

The server hands our one fixed line `BOOT` to the login shell (sh, bash, ash, fish, csh), which
becomes a POSIX `sh`. That reads two encoded lines from its standard input: the envelope below and
the script; what follows is the script's own input. So nothing of ours is quoted for a foreign
shell, the length of a command line does not matter (dropbear takes 9,000 bytes), and no argument
shows in the board's process list. `read` takes its bytes one by one from a pipe, as POSIX demands,
and leaves the rest. A line without its end is one that a lost link cut: half of a script, `rm -rf
/data` of `rm -rf /data/old`, is not run.

The envelope prints random markers around the output of the script, on both streams: what start
files print before, or left-over children after, is told apart as noise.
"""

from __future__ import annotations

import dataclasses
import functools
import re

# What `printf %b` must be told as an escape, the backslash included.
_UNPRINTABLE = re.compile(rb"[^\x20-\x5b\x5d-\x7e]")
_MARK = "@mark@"  # a command's own takes its place
_BEGIN_LINE = re.compile(rb"([0-9]{1,18}) ([gt])\n")

BOOT = """exec sh -c 'IFS= read -r _h_e || exit 255; _h_e=$(printf %b "$_h_e"); eval "$_h_e"'"""

# A server starts the login shell as the leader of a new process group, and `exec` keeps its
# process id, so `kill -0 -$$` finds the group of this very shell. Where it does not (a wrapper,
# some small servers), setsid makes one; without setsid the children are found by their parents.
_ENVELOPE = """_h_m=%(token)s
if kill -0 -$$ 2>/dev/null; then _h_g=g
elif [ -z "${_h_again-}" ] && command -v setsid >/dev/null 2>&1; then
  _h_again=1 exec setsid sh -c 'eval "$1"' sh "$_h_e"
else _h_g=t
fi
unset _h_again _h_e
IFS= read -r _h_u || exit 255
_h_u=$(printf %%b "$_h_u")
printf '%%s.b %%s %%s\\n' "$_h_m" $$ "$_h_g"
printf '%%s.b\\n' "$_h_m" >&2
( eval "$_h_u" )
_h_s=$?
printf '%%s.e %%s\\n' "$_h_m" "$_h_s"
printf '%%s.e\\n' "$_h_m" >&2
exit "$_h_s"
"""

# Ends a process group with its session (g) or a tree (t) of processes and prints `gone`, or `left`
# and their ids. The session counts because `timeout`, for one, makes a group of its own; what was
# started detached has a session of its own and is left alone. `kill -SIGNAL -GROUP` is the one
# spelling that dash, bash and busybox share. A zombie counts as gone: it holds nothing, and some
# boards' init never collects it.
_END_PROCESSES = """root=%(pid)d mode=%(mode)s
tree=$root
scan() {
  for f in /proc/[0-9]*/stat; do
    { IFS= read -r l <"$f"; } 2>/dev/null || continue
    p=${l%%%% *}
    set -- ${l##*) }
    case $1 in Z|X) continue;; esac
    if [ $mode = g ]; then
      if [ "$3" = $root ] || [ "$4" = $root ]; then live="$live $p"; fi
    else
      case " $tree " in
        *" $p "*) live="$live $p";;
        *) case " $tree " in *" $2 "*) tree="$tree $p"; live="$live $p"; grew=1;; esac;;
      esac
    fi
  done
}
members() {
  grew=1
  while [ $grew = 1 ]; do grew=0; live=; scan; done
  if [ ! -r /proc/self/stat ] && kill -0 -$root 2>/dev/null; then live=$root; fi
}
send() {
  if [ $mode = g ]; then kill -"$1" -$root; fi
  if [ -n "$live" ]; then kill -"$1" $live; fi
} 2>/dev/null
pause() { sleep 0.1 2>/dev/null || sleep 1; }
members
n=0
while [ -n "$live" ] && [ $n -lt 20 ]; do
  case $n in 0) send TERM;; 5|10|15) send KILL;; esac
  pause
  n=$((n + 1))
  members
done
if [ -n "$live" ]; then echo "left$live"; else echo gone; fi
"""


@functools.lru_cache(maxsize=32)  # the same goes to every board of a farm
def encode(script: str) -> bytes:
    """One line for `printf %b`, in printable ASCII. Raises ValueError for a NUL character."""
    raw = script.encode("utf-8", "surrogateescape")
    if b"\0" in raw:
        raise ValueError("a command cannot hold a NUL character")
    return _UNPRINTABLE.sub(lambda found: b"\\0%03o" % found[0][0], raw)


def frame(token: str, script: str) -> bytes:
    """What goes to the standard input of `BOOT` before the script's own input."""
    envelope = encode(_ENVELOPE % {"token": _MARK})  # of any command: encoded once
    return envelope.replace(_MARK.encode(), token.encode()) + b"\n" + encode(script) + b"\n"


def end_processes(pid: int, mode: str) -> str:
    """A script that ends what a framed command started; see `Begun`."""
    if mode not in ("g", "t"):
        raise ValueError(f"mode {mode!r}, expected 'g' or 't'")
    return _END_PROCESSES % {"pid": pid, "mode": mode}


@dataclasses.dataclass(frozen=True)
class Begun:
    """The command runs: `pid` leads its process group (mode g) or is the root of its tree (t)."""

    pid: int
    mode: str
    start: int  # where its output begins


@dataclasses.dataclass(frozen=True)
class Split:
    """A stream taken apart. `status` is None on stderr, and where the end marker is missing."""

    payload: bytes
    noise: bytes
    status: int | None
    complete: bool


def number(text: bytes | str) -> int | None:
    """A whole number of at most 18 decimal digits, as a board prints one; None for other text."""
    raw = text.encode(errors="replace") if isinstance(text, str) else text
    return int(raw) if re.fullmatch(rb"\s*[0-9]{1,18}\s*", raw) else None


def find_begin(token: str, stdout: bytes | bytearray) -> Begun | None:
    # No expression with the token in it: each command has its own, and compiling takes longer than
    # all else that is done for one.
    mark = token.encode() + b".b "
    at = stdout.find(mark)
    while at >= 0:
        found = _BEGIN_LINE.match(stdout, at + len(mark))
        if found:
            return Begun(int(found[1]), found[2].decode(), found.end())
        at = stdout.find(mark, at + 1)
    return None


def has_end(token: str, stream: bytes | bytearray, since: int) -> bool:
    """Whether the end marker stands in `stream`, which was searched up to `since` before."""
    mark = token.encode() + b".e"
    at = stream.find(mark, max(0, since - len(mark) - 32))
    return at >= 0 and stream.find(b"\n", at) >= 0


def split(token: str, stream: bytes | bytearray) -> Split:
    """Noise before the begin marker and after the end marker, and the payload between them."""
    data = bytes(stream)
    begin = data.find(token.encode() + b".b")
    start = data.find(b"\n", begin) + 1 if begin >= 0 else 0
    if start == 0:
        return Split(b"", data, None, False)
    mark = token.encode() + b".e"
    at = data.rfind(mark)
    if at < start:
        return Split(data[start:], data[:begin], None, False)
    line, _, after = data[at + len(mark) :].partition(b"\n")
    return Split(data[start:at], data[:begin] + after, number(line), True)
