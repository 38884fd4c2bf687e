"""What each stage leaves for the store and the dashboard, beside its verdict.

`Verdict.details` holds `model_dump(mode="json")` of one of these. Long raw series are not here:
they are arrays in the run's raw folder, named by the `Series` rows of the store.
"""

from __future__ import annotations

from harness.verdicts import Record


class StageDetails(Record):
    """What every stage may leave. A run that was refused before it started has nothing else."""

    memory_table: tuple[tuple[str, float], ...] | None = None  # (what, MiB) of a model too large


class TinyDetails(StageDetails):
    prompts: int
    tokens_compared: int
    first_mismatch: str | None  # "prompt 2, token 5: board 17, reference 99"
    rss_first_mb: float
    rss_last_mb: float
    tokens_per_s: float


class OpError(Record):
    """One op of one comparison mode. Errors are over all positions of the reference run."""

    op: str
    kind: str
    layer: int | None
    # "local": fed the reference's inputs, one token; "prefill": several; "free": the engine on its
    # own
    mode: str
    max_abs: float | None  # None: the board's output is not finite
    rel_l2: float | None
    cosine: float | None
    worst_row_rel_l2: float | None
    base_rel_l2: float  # naive implementation with the same quantisation
    non_finite: int  # how many values
    outcome: str  # an Outcome value
    reason: str = ""
    int8_steps: float | None = None  # the largest error in steps of an int8 code of 32 values


class LogitsAgreement(Record):
    positions: int
    mean_kl: float
    p99_kl: float
    mean_kl_low: float  # bootstrap over texts, or over the positions of a single one, 95 %
    mean_kl_high: float
    top1: float
    top1_low: float  # Wilson, 95 %
    top1_high: float
    kl_histogram: tuple[tuple[float, int], ...]  # (lower edge in log10 KL, count)
    prompts: int = 1  # texts that the positions belong to
    p99_kl_low: float | None = None  # bootstrap over the same
    p99_kl_high: float | None = None


class TextComparison(Record):
    prompt: str
    reference: str
    board: str
    tokens: int
    first_divergence: int | None  # token index, None: identical; beyond the noise if any is
    near_tie: bool  # every divergence lies within the noise
    margin: float | None  # how much the reference prefers its own token at the divergence
    noise: float  # noise floor the margin was compared with
    repetition_rate: float  # share of repeated 4-grams in the board's text


class AccuracyDetails(StageDetails):
    ops: tuple[OpError, ...]
    first_bad_op: str | None
    logits: LogitsAgreement
    text: TextComparison
    repeats: int
    repeatable: bool  # the same run gives the same bits each time
    hash_with_taps: str
    hash_without_taps: str


class CurvePoint(Record):
    sweep: int
    order: int  # position within the sweep (lengths are shuffled)
    length: int  # positions in the cache before the token
    tpot_ms: float  # median over the point's tokens
    started_s: float  # since the run began
    clock_mhz: float | None
    temperature_c: float | None


class CurveJump(Record):
    length: int
    ratio: float  # of TPOT after to before
    cause: str  # "engine" | "throttling" | "unclear"
    started_s: float | None = None  # throttling: when it began, since the run did


class CurveFit(Record):
    model: str  # affine | kink | step | step+kink
    delta_bic: float  # affine's BIC minus the chosen model's
    intercept_ms: float
    slope_us_per_position: float
    fitted: tuple[tuple[int, float], ...]  # (length, ms)
    jumps: tuple[CurveJump, ...]


class CurveDetails(StageDetails):
    points: tuple[CurvePoint, ...]
    fit: CurveFit
    context: int
    tokens_per_s_start: float
    tokens_per_s_end: float
    end_ratio: float  # tokens/s at the end of the context over the start
    ttft_s: float
    prefill_tokens_per_s: float
    weight_bytes: int
    kv_bytes_per_position: int
    bandwidth_gb_s: float | None  # the board's own linear read, measured in the same run
    ceiling_tokens_per_s: float | None  # bandwidth over weight bytes
    physics: str  # one sentence
    rss_peak_mb: float
    memory_mb: dict[str, float]  # weights, kv, temporary, other
    clocks: str  # "valid", "unknown" or the reason why the run is invalid
    tokens_per_s_middle: float | None = None  # at the median of the lengths


class StressTurn(Record):
    conversation: int
    turn: int
    attempt: int  # of the engine process
    prompt_tokens: int
    new_tokens: int
    cached_tokens: int  # positions in the cache after the turn
    finish: str  # stop | length | cancelled | killed
    started_s: float
    ttft_s: float | None
    tpot_ms: float | None


class StressSample(Record):
    t_s: float
    rss_mb: float | None
    cpu_percent: float | None
    temperature_c: float | None
    clock_mhz: float | None
    tokens_per_s: float | None  # over the second that ended here
    own_mb: float | None = None  # anonymous memory and swap, which a leak is judged by


class StressDetails(StageDetails):
    minutes: float
    tokens: int
    turns: tuple[StressTurn, ...]
    samples: tuple[StressSample, ...]  # decimated to at most 2,000
    itl_p50_ms: float
    itl_p99_ms: float
    leak: str  # "none" | "leak" | "too short to tell"
    leak_growth_mb: float | None
    leak_p: float | None
    sustained_ratio: float | None  # last part over the early part
    throttled_s: float
    cancelled: int
    restarts: int
    golden_before: str  # hash of a golden generation
    golden_after: str


class LadderRung(Record):
    """One way to run, and its speed over `visits` in turns with the others."""

    question: str  # "threads", "kv_layout" or "huge_pages": what it is an answer to
    threads: int
    cpus: tuple[int, ...] | None  # None: all that are allowed
    kv_layout: str
    huge_pages: bool
    tokens_per_s: float
    low: float  # bootstrap over visits, 95 %
    high: float
    visits: int


class LadderDetails(StageDetails):
    rungs: tuple[LadderRung, ...]
    threads: int  # what was chosen
    cpus: tuple[int, ...] | None
    kv_layout: str
    huge_pages: bool
    tokens_per_s: float
    clocks: str


class ProfiledOp(Record):
    """An op, or the same op of all layers together. Times are of one traced token."""

    op: str
    kinds: str  # of what is fused in it, "linear+add"
    part: str  # of the board: matrix, vector or control
    calls: int
    shallow_us: float
    deep_us: float
    share: float  # of the token at the deep position
    bytes: int  # that it reads there: weights, keys and values
    gb_s: float | None
    of_ceiling: float | None


class ProfiledDepth(Record):
    """Tokens at one position. `token_ms` without the trace, the other times with it: the sum of the
    ops − `overlap_ms` + `residual_ms` = `traced_ms`. Counts are of one token."""

    position: int
    tokens: int
    token_ms: float
    traced_ms: float
    ops_ms: float
    overlap_ms: float  # several at once
    residual_ms: float  # no op
    bytes: int
    kv_bytes: int  # of these, keys and values
    gb_s: float
    cpu_ms: float  # of all threads
    minor_faults: float
    major_faults: float
    voluntary_switches: float
    involuntary_switches: float
    counters: dict[str, float]


class ProfileDetails(StageDetails):
    bottleneck: str  # memory, compute, dispatch, waiting, contended, fallback
    sentence: str
    advice: str
    groups: tuple[ProfiledOp, ...]  # the largest first
    ops: tuple[ProfiledOp, ...]  # in the order of the program
    depths: tuple[ProfiledDepth, ...]  # shallow, deep
    weight_bytes: int
    bandwidth_gb_s: float
    bandwidth_what: str
    threads: int
    cpu_busy: float | None  # of these threads
    cores: tuple[tuple[int, float], ...]  # (core, busy share), of all processes
    accelerators: tuple[tuple[str, float], ...]
    counters_missing: tuple[tuple[str, str], ...]  # (event, reason)
    kernels: str  # what ran
    kv_bytes_per_position: int
    # One typical token at each depth: (op's index in `ops`, start and duration in µs)
    typical: tuple[tuple[tuple[int, float, float], ...], ...]
    clocks: str


DETAILS = {
    "profile": ProfileDetails,
    "tiny": TinyDetails,
    "accuracy": AccuracyDetails,
    "curve": CurveDetails,
    "stress": StressDetails,
    "ladder": LadderDetails,
}
