"""llama.cpp behind the protocol. Run by the Python of an environment that has it, nothing else."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp as lib  # type: ignore[import-not-found]  # only there where this runs
import numpy as np

from .predictions import told
from .protocol import serve

BATCH = 512
FLASH = {False: 0, True: 1}  # LLAMA_FLASH_ATTN_TYPE_DISABLED, _ENABLED


class Session:
    """A context with one sequence. `batch` is how many tokens a prefill step takes."""

    def __init__(self, model: Any, threads: int, context: int, flash: bool, batch: int) -> None:
        parameters = lib.llama_context_default_params()
        parameters.n_ctx = context
        parameters.n_batch = parameters.n_ubatch = BATCH
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.flash_attn_type = FLASH[flash]
        self.handle = lib.llama_init_from_model(model, parameters)
        if not self.handle:
            raise RuntimeError(f"llama_init_from_model failed for a context of {context}")
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self.position, self.batch = 0, batch

    def step(self, tokens: Sequence[int]) -> None:
        """Append `tokens`; only the last one's logits are computed."""
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        status = lib.llama_decode(self.handle, lib.llama_batch_get_one(array, len(tokens)))
        if status:
            raise RuntimeError(f"llama_decode returned {status} at position {self.position}")
        lib.llama_synchronize(self.handle)
        self.position += len(tokens)

    def all_logits(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """Append `tokens` in one batch and return all their logits (T, V)."""
        batch = lib.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for index, token in enumerate(tokens):
                batch.token[index], batch.pos[index] = token, self.position + index
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
                batch.logits[index] = 1
            status = lib.llama_decode(self.handle, batch)
            if status:
                raise RuntimeError(f"llama_decode returned {status} at position {self.position}")
            self.position += len(tokens)
            rows = [
                np.ctypeslib.as_array(
                    lib.llama_get_logits_ith(self.handle, i), (self.vocab,)
                ).copy()
                for i in range(len(tokens))
            ]
        finally:
            lib.llama_batch_free(batch)
        return np.stack(rows)

    def logits(self) -> np.ndarray[Any, Any]:
        return np.ctypeslib.as_array(
            lib.llama_get_logits_ith(self.handle, -1), (self.vocab,)
        ).copy()


MODELS: dict[tuple[str, bool], Any] = {}
SESSIONS: dict[str, Session] = {}


def about() -> dict[str, Any]:
    text = lib.llama_print_system_info().decode()
    return {"version": lib.__version__, "system": text}


def open_session(
    session: str,
    model: str,
    threads: int,
    context: int,
    flash: bool,
    repack: bool,
    batch: int = BATCH,
) -> dict[str, Any]:
    """`repack` lets llama.cpp rearrange weights when it loads them (its `use_extra_bufts`)."""
    if (model, repack) not in MODELS:
        parameters = lib.llama_model_default_params()
        parameters.use_extra_bufts = repack
        handle = lib.llama_model_load_from_file(model.encode(), parameters)
        if not handle:
            raise RuntimeError(f"{model}: llama.cpp cannot load it")
        MODELS[model, repack] = handle
    SESSIONS[session] = Session(MODELS[model, repack], threads, context, flash, batch)
    return {}


def close_session(session: str) -> dict[str, Any]:
    lib.llama_free(SESSIONS.pop(session).handle)
    return {}


def truncate(session: str, position: int) -> dict[str, Any]:
    found = SESSIONS[session]
    memory = lib.llama_get_memory(found.handle)
    if not lib.llama_memory_seq_rm(memory, 0, position, -1):
        raise RuntimeError(f"llama.cpp cannot go back to position {position}")
    found.position = position
    return {}


def feed(session: str, tokens: list[int]) -> dict[str, Any]:
    """Prefill; seconds of all of it."""
    found = SESSIONS[session]
    begin = time.perf_counter()
    for start in range(0, len(tokens), found.batch):
        found.step(tokens[start : start + found.batch])
    return {"seconds": time.perf_counter() - begin, "position": found.position}


def decode(session: str, tokens: list[int]) -> dict[str, Any]:
    """One step for each token; seconds of each."""
    found, seconds = SESSIONS[session], []
    for token in tokens:
        begin = time.perf_counter()
        found.step((token,))
        seconds.append(time.perf_counter() - begin)
    return {"seconds": seconds}


def check(session: str, tokens: list[int], ids: list[list[int]], mode: str) -> dict[str, Any]:
    found = SESSIONS[session]
    if mode == "prefill":
        logits = found.all_logits(tokens)
    else:
        rows = []
        for token in tokens:
            found.step((token,))
            rows.append(found.logits())
        logits = np.stack(rows)
    return told(logits, ids)


def save(session: str, path: str) -> dict[str, Any]:
    """The cache as a file, for a session of the same model and the same flash setting."""
    found = SESSIONS[session]
    if not lib.llama_state_save_file(found.handle, path.encode(), (ctypes.c_int32 * 1)(), 0):
        raise RuntimeError(f"{path}: llama.cpp cannot save its state")
    return {"position": found.position}


def load(session: str, path: str, position: int) -> dict[str, Any]:
    found = SESSIONS[session]
    count = ctypes.c_size_t()
    if not lib.llama_state_load_file(
        found.handle, path.encode(), (ctypes.c_int32 * 1)(), 1, ctypes.byref(count)
    ):
        raise RuntimeError(f"{path}: llama.cpp cannot load this state")
    found.position = position
    return {}


if __name__ == "__main__":
    lib.llama_backend_init()
    serve(
        {
            "about": about,
            "open": open_session,
            "close": close_session,
            "truncate": truncate,
            "feed": feed,
            "decode": decode,
            "check": check,
            "save": save,
            "load": load,
        }
    )
