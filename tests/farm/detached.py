"""Work that a test leaves on a board."""

from __future__ import annotations


def detached(work: str) -> str:
    """The shell command that starts `work` (shell text without single quotes) in a session of its
    own and ends once it is there.

    A command that ended before `setsid` had taken effect would leave the work in its own process
    group, which a board may end with it: on a busy machine that is a race. The file `up` stays.
    """
    return (
        f"rm -f up; nohup setsid sh -c 'echo up > up; {work}' </dev/null >/dev/null 2>&1 &"
        " while [ ! -s up ]; do sleep 0.02; done"
    )
