/* The native unit's interface: what Python fills in, and what each instruction set provides.
 *
 * A decode step is a list of commands over buffers of float32, each [T or R rows][width]. Pointers
 * are prepared once; a step is one call. Letters: T new tokens, R rows whose logits are wanted,
 * S cached slots, H query heads, K key/value heads, D head dimension, N outputs, K inputs.
 * The structures are read by engine/native/library.py, which checks their sizes when it loads.
 */
#ifndef DN_H
#define DN_H
#include <stddef.h>
#include <stdint.h>

enum { DN_F32, DN_F16, DN_BF16, DN_Q4, DN_Q8, DN_Q4K, DN_Q5K, DN_Q6K };
enum { DN_ROW, DN_BLOCKED, DN_INTERLEAVED };
enum { DN_KV_F32, DN_KV_F16, DN_KV_INT8, DN_KV_INT4 };
enum { DN_SD, DN_DS, DN_SKD };
enum {
    DN_EMBED, DN_RMSNORM, DN_LINEAR, DN_ROPE, DN_KV_APPEND, DN_ATTENTION, DN_SWIGLU, DN_ADD,
    DN_SELECT
};
enum { /* flags of a command */
    DN_ROWS_R = 1,        /* works on R rows, not T */
    DN_INT8 = 2,          /* linear: quantise what goes in, per row and 32 inputs */
    DN_SWIGLU_OUT = 4,    /* linear: out[0] = silu(w[0] x) * w[1] x */
    DN_DEQUANTISE = 8,    /* linear: widen 16 rows to float32 first, then multiply */
    DN_FUSED = 16,        /* attention: rotate, append and attend in one */
    DN_PADDED = 32        /* attention: every row reads as many slots as the longest one */
};

/* A weight (N, K); parts as engine/quantize/schemes.py describes them. */
typedef struct {
    int32_t scheme, layout, n, k;
    int32_t group;     /* inputs per scale */
    int32_t zero;      /* q4: what is taken off a nibble */
    int32_t scale_f32; /* d and m are float32, not float16 */
    int32_t unused;
    int64_t stride;    /* bytes from one block of 16 rows to the next, interleaved */
    const void *q, *h, *d, *m, *s, *mn, *dm;
} dn_weight;

/* The cache of one layer: (B, K, S, D), (B, K, S/32, D, 32) or (B, S, K, D) elements; the scales
 * (B, K, S) are float16. */
typedef struct {
    int32_t scheme, key_layout, value_layout, kv_heads, head_dim, sequences;
    int64_t slots; /* of one sequence */
    void *k, *v;
    uint16_t *k_scale, *v_scale;
} dn_cache;

typedef struct {
    int32_t kind, flags;
    int32_t op;    /* of the program: for the trace and for errors */
    int32_t count; /* weights of a linear, heads of a per-head norm */
    int32_t width; /* of x: inputs of a linear, elements of a norm */
    int32_t heads, kv_heads, head_dim;
    int32_t keep;  /* slots of the kept prefix, 0 without a ring */
    float eps, rope_scale;
    int32_t name;  /* of the op, as dn_crash_name gave it */
    const float *x, *x2, *x3, *x4; /* inputs; attention: q, k, v, queries for the prefix */
    float *out[3]; /* rope: q, k, q for the prefix; DN_SWIGLU_OUT: product, gate, up */
    const float *norm;     /* linear: RMSNorm weight applied to x first */
    const float *residual; /* linear: added to out[0] */
    const float *bias[3];
    const dn_weight *w[3];
    const dn_cache *cache;
    const double *inv_freq; /* (D/2,) */
} dn_command;

/* What changes from step to step. */
typedef struct {
    int32_t tokens, rows; /* T, R */
    const int64_t *ids, *positions, *row_index, *slots, *starts, *visible, *prefix_positions;
    /* results */
    int32_t bad_op;       /* the first op whose output was not finite, or -1 */
    int32_t overflow;     /* keys and values that the cache's scheme cannot hold */
} dn_step;

typedef struct { int64_t step, op, start_ns, end_ns; } dn_event;

typedef struct dn_team dn_team;

/* NULL when there is no memory, no thread, or no such instruction set in this build. `cpus[i]` pins
 * helper i (from 1 on; the caller is thread 0), -1 or NULL leaves it. */
dn_team *dn_team_create(int32_t threads, const int32_t *cpus, const char *isa);
void dn_team_destroy(dn_team *);
int32_t dn_team_threads(const dn_team *);
/* Make room for the largest of what commands need; 0 or -1 (no memory). `k` is the widest input of
 * a linear, `group` H/K, `slots` those of one sequence. */
typedef struct { int64_t tokens, k, dim, heads, group, slots; } dn_needs;
int32_t dn_reserve(dn_team *, const dn_needs *);
/* Run commands; returns 0, or DN_STOPPED when one met bad numbers (see dn_step). The others refuse
 * a step before anything of it ran: more rows than reserved; commands with different RoPE tables; a
 * token, row or slot that does not exist; a team whose helpers live in the process that forked. */
enum { DN_STOPPED = -1, DN_TOO_LARGE = -2, DN_TWO_ROPES = -3, DN_OUTSIDE = -4, DN_FORKED = -5 };
int32_t dn_run(dn_team *, const dn_command *, int32_t count, dn_step *);
/* Where the trace goes: a ring of `capacity` events (NULL: none); `*recorded` counts all. */
void dn_trace(dn_team *, dn_event *ring, int64_t capacity, int64_t *recorded, int64_t step);

/* Read every page of a range; the sum keeps the compiler from leaving it out. */
uint64_t dn_touch(const void *start, int64_t bytes, int64_t page);
/* rates[pass] = GB/s of reading `bytes` with `streams` streams a thread; the first pass still writes
 * back what was just filled. -1 when memory or threads cannot be had. */
int32_t dn_read_bandwidth(int32_t threads, int64_t bytes, int32_t streams, int32_t prefetch,
                          int32_t huge, int32_t passes, double *rates);
const char *dn_isas(void);    /* compiled in, comma-separated, slowest first */
uint64_t dn_hwcap(int32_t n); /* AT_HWCAP, AT_HWCAP2; 0 where there is none */
void dn_sizes(int64_t sizes[5]);

/* From now on a fatal signal of this process writes a record to `fd`, which stays open, and then
 * goes where it went before. 0, or -1 where that cannot be had; once in a process. */
int32_t dn_crash_record(int32_t fd);
/* Keep the id of an op for such a record; what commands name it by. 0 (no name) when all is full. */
int32_t dn_crash_name(const char *id);

/* --- what kernels.c provides for each instruction set ------------------------------------- */

/* Activations as kernels read them: float32, and with DN_INT8 quantised. */
typedef struct {
    const float *x;   /* [rows][k] */
    const int8_t *q;  /* [rows][k] */
    const float *s;   /* [rows][k/32] scales */
    const int32_t *t; /* [rows][k/16] sums of q over 16 inputs */
    const float *u;   /* [rows][k/32] scale times sum over 32 */
    int64_t rows;
    int32_t k;
} dn_input;

typedef struct {
    const char *isa;
    void (*rmsnorm)(float *out, const float *x, const float *w, int32_t width, float eps);
    void (*quantise)(int8_t *q, float *s, int32_t *t, float *u, const float *x, int32_t k);
    /* Rows of 16 outputs from `first` to `last`: y[row * n + output]. `tile` (16, k) floats. */
    void (*linear)(const dn_weight *, const dn_input *, float *y, int32_t first, int32_t last,
                   int32_t flags, float *tile);
    void (*embed)(const dn_weight *, int64_t row, float *out);
    void (*rope)(float *out, const float *x, const float *cos, const float *sin, int32_t heads,
                 int32_t head_dim);
    /* One key/value head's vector into slot `slot`; returns how many values the cache cannot hold:
     * then nothing is written. */
    int32_t (*append)(const dn_cache *, int32_t is_value, int64_t slot, int32_t head, const float *x);
    /* Part of an attention: heads of one group over slots [from, to) of a sequence.
     * q (G, D) scaled, prefix (G, D) for slots below `keep`; part (G, D + 2): o, max, sum. */
    void (*attend)(const dn_cache *, int64_t start, int32_t head, int32_t group, const float *q,
                   const float *prefix, int32_t keep, int32_t from, int32_t to, float *scores,
                   float *part);
    /* (count) parts of (stride) floats → (D,) */
    void (*combine)(float *out, const float *parts, int32_t count, int64_t stride, int32_t head_dim);
    void (*swiglu)(float *out, const float *gate, const float *up, int32_t n);
    void (*add)(float *out, const float *a, const float *b, int32_t n);
    int32_t (*finite)(const float *x, int32_t n);
} dn_kernels;

enum { DN_CHUNK = 256 }; /* slots of one part of an attention, whatever the number of threads */

#endif
