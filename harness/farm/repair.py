"""A board that was lost, or does not get clean, in a campaign: brought back, or set aside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.boards import recovery

if TYPE_CHECKING:
    from harness.errors import BoardError
    from harness.farm.board import BoardRun

# What a board that answers nothing looks like. A deadline may also pass on a slow one: it is asked.
LOST = ("board-lost", "unreachable", "timeout")


class Repairs:
    """One board's part in a campaign. The rungs are climbed at most twice: a board that dies again
    and again is set aside."""

    MOST = 2

    def __init__(self, run: BoardRun) -> None:
        self.run = run
        self._climbed = 0
        self._given_up = False

    @property
    def _may(self) -> bool:
        """A health check is a question: it restarts nothing."""
        return not (self.run.stopping() or self._given_up or self.run.orders.admits)

    def after(self, error: BoardError) -> bool:
        """Whether a board that was lost by `error` was restarted and answers again.

        One that is not brought back is set aside, unless it never answered before and nothing can
        restart it: then it is more likely described wrongly. One that answers is left as it is.
        Raises Interrupted.
        """
        if error.kind not in LOST or not self._may:
            return False
        self.run.close()
        self.run.say("", "looking whether it still answers")
        if recovery.answers(self.run.board):
            return False
        return self._bring_back(error.found)

    def of_what_stays(self, left: str) -> bool:
        """Whether a board on which something could not be ended was restarted. Else it is set
        aside; nothing is measured beside what runs there."""
        if not self._may:
            return False
        self.run.close()
        return self._bring_back(f"it does not get clean: {left}")

    def _bring_back(self, why: str) -> bool:
        run, board, care = self.run, self.run.board, self.run.campaign.care
        boot_id = care.last_boot_id(board.name)
        if boot_id is None and not recovery.has_rungs(board):
            return False
        tried = [f"it was brought back {self.MOST} times already"]
        if self._climbed < self.MOST:
            self._climbed += 1
            run.campaign.reporter.note(f"{board.name}: {why}; restarting it")
            tried = recovery.bring_back(
                board,
                care,
                boot_id=boot_id,
                tell=lambda text: run.say("", text),
                check=run.check_stop,
            )
        if not tried:
            run.campaign.reporter.note(f"{board.name}: it was restarted and answers again")
            return True
        self._given_up = True
        set_aside = care.quarantine(board.name, "; ".join([why, *tried]))
        run.campaign.reporter.note(f"{board.name}: {set_aside}")
        return False
