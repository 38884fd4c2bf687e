/* A command list, run by every thread of a team at once: each takes its share of a command, and a
 * barrier stands between commands. What a thread's share is never changes a result. */
#include <math.h>
#include <string.h>

#include "team.h"

static int32_t least(int64_t a, int64_t b) { return (int32_t)(a < b ? a : b); }
static int32_t share(int64_t n, int32_t thread, int32_t threads) { return (int32_t)(n * thread / threads); }
static int32_t rows_of(const dn_team *team, const dn_command *c)
{
    return c->flags & DN_ROWS_R ? team->step->rows : team->step->tokens;
}

static void bad(dn_team *team, const dn_command *c, int32_t overflow)
{
    int32_t at = (int32_t)(c - team->commands) + 1, none = 0;
    if (overflow) atomic_fetch_add(&team->overflow, overflow);
    /* All threads are at the same command, so whoever comes first names it. */
    if (atomic_compare_exchange_strong(&team->stop, &none, at)) team->step->bad_op = c->op;
}

static void check(dn_team *team, const dn_command *c, const float *x, int32_t n)
{
    if (!team->kernels->finite(x, n)) bad(team, c, 0);
}

/* Cosines and sines of the step's positions, once for all layers; angles in double. */
static void angles(const int64_t *positions, int32_t tokens, int32_t half, const double *inv_freq,
                   double scale, float *cosine, float *sine)
{
    for (int32_t t = 0; t < tokens; t++)
        for (int32_t i = 0; i < half; i++) {
            double angle = (double)positions[t] * inv_freq[i];
            cosine[t * half + i] = (float)(cos(angle) * scale);
            sine[t * half + i] = (float)(sin(angle) * scale);
        }
}

static float *angle_table(const dn_team *team, int32_t which, int32_t half)
{
    return team->shared.angles + (int64_t)which * team->step->tokens * half;
}

static int outside(const int64_t *values, int64_t count, int64_t first, int64_t behind)
{
    int bad = values == NULL;
    for (int64_t i = 0; values && i < count; i++) bad |= values[i] < first || values[i] >= behind;
    return bad;
}

/* Whether a command would read or write beyond what there is. */
static int beyond(const dn_team *team, const dn_command *c)
{
    const dn_step *s = team->step;
    if (c->kind == DN_EMBED) return outside(s->ids, s->tokens, 0, c->w[0]->n);
    if (c->kind == DN_SELECT) return outside(s->row_index, s->rows, 0, s->tokens);
    if (!c->cache) return 0;
    int64_t slots = c->cache->slots, all = slots * c->cache->sequences;
    int plain = c->cache->key_layout == DN_SKD; /* one run of slots, in which a sequence may begin anywhere */
    if (c->kind == DN_KV_APPEND || c->flags & DN_FUSED)
        if (outside(s->slots, s->tokens, 0, all)) return 1;
    if (c->kind != DN_ATTENTION) return 0;
    if (outside(s->visible, s->tokens, 1, least(slots, team->reserved.slots) + 1)) return 1;
    if (outside(s->starts, s->tokens, 0, all)) return 1;
    for (int32_t t = 0; t < s->tokens; t++)
        if (plain ? s->starts[t] + s->visible[t] > all : s->starts[t] % slots != 0) return 1;
    return 0;
}

int32_t dn_start_step(dn_team *team);
int32_t dn_start_step(dn_team *team)
{
    const dn_command *first = NULL;
    for (int32_t i = 0; i < team->count; i++) {
        const dn_command *c = &team->commands[i];
        if (beyond(team, c)) return DN_OUTSIDE;
        if (!c->inv_freq) continue;
        if (!first) first = c;
        if (c->inv_freq != first->inv_freq || c->head_dim != first->head_dim) return DN_TWO_ROPES;
    }
    if (!first) return 0;
    dn_step *s = team->step;
    int32_t half = first->head_dim / 2;
    angles(s->positions, s->tokens, half, first->inv_freq, first->rope_scale, angle_table(team, 0, half),
           angle_table(team, 1, half));
    if (s->prefix_positions)
        angles(s->prefix_positions, s->tokens, half, first->inv_freq, first->rope_scale,
               angle_table(team, 2, half), angle_table(team, 3, half));
    return 0;
}

static void run_embed(dn_team *team, const dn_command *c, int32_t thread)
{
    int32_t rows = rows_of(team, c), from = share(rows, thread, team->threads);
    int32_t to = share(rows, thread + 1, team->threads);
    for (int32_t t = from; t < to; t++) {
        float *out = c->out[0] + (int64_t)t * c->w[0]->k;
        team->kernels->embed(c->w[0], team->step->ids[t], out);
        check(team, c, out, c->w[0]->k);
    }
}

static void run_rmsnorm(dn_team *team, const dn_command *c, int32_t thread)
{
    int64_t vectors = (int64_t)rows_of(team, c) * c->count;
    int32_t from = share(vectors, thread, team->threads), to = share(vectors, thread + 1, team->threads);
    for (int64_t i = from; i < to; i++) {
        float *out = c->out[0] + i * c->width;
        team->kernels->rmsnorm(out, c->x + i * c->width, c->norm, c->width, c->eps);
        check(team, c, out, c->width);
    }
}

/* What quantised activations stand for, where floats are multiplied after all. */
static void widened(float *x, const int8_t *q, const float *s, int32_t k)
{
    for (int32_t i = 0; i < k; i++) x[i] = (float)q[i] * s[i / 32];
}

/* What goes into a linear: normalised and quantised by each thread for itself when there is one
 * row, by rows and together when there are several. */
static dn_input prepare(dn_team *team, const dn_command *c, int32_t thread)
{
    const dn_kernels *kernels = team->kernels;
    int32_t rows = rows_of(team, c), k = c->width;
    dn_scratch *own = &team->scratch[thread];
    dn_shared *all = &team->shared;
    dn_input in = {.x = c->x, .rows = rows, .k = k};
    if (rows == 1) {
        if (c->norm) {
            kernels->rmsnorm(own->x, c->x, c->norm, k, c->eps);
            in.x = own->x;
        }
        if (c->flags & DN_INT8) {
            kernels->quantise(own->q, own->s, own->t, own->u, in.x, k);
            in.q = own->q;
            in.s = own->s;
            in.t = own->t;
            in.u = own->u;
            if (c->flags & DN_DEQUANTISE) {
                widened(own->x, own->q, own->s, k);
                in.x = own->x;
            }
        }
        return in;
    }
    if (!c->norm && !(c->flags & DN_INT8)) return in;
    int32_t from = share(rows, thread, team->threads), to = share(rows, thread + 1, team->threads);
    for (int64_t row = from; row < to; row++) {
        const float *x = c->x + row * k;
        if (c->norm) {
            kernels->rmsnorm(all->x + row * k, x, c->norm, k, c->eps);
            x = all->x + row * k;
        }
        if (c->flags & DN_INT8) {
            kernels->quantise(all->q + row * k, all->s + row * (k / 32), all->t + row * (k / 16),
                              all->u + row * (k / 32), x, k);
            if (c->flags & DN_DEQUANTISE) widened(all->x + row * k, all->q + row * k, all->s + row * (k / 32), k);
        }
    }
    if (c->norm || c->flags & DN_DEQUANTISE) in.x = all->x;
    if (c->flags & DN_INT8) {
        in.q = all->q;
        in.s = all->s;
        in.t = all->t;
        in.u = all->u;
    }
    dn_barrier(team);
    return in;
}

/* Work is taken in pieces, not dealt out: a thread whose CPU is taken away or slow holds up the
 * others by one piece. The barrier that ends a command makes all of it available again. 0 when
 * nothing is left. */
static int take(dn_team *team, int64_t total, int64_t piece, int64_t *from, int64_t *to)
{
    *from = atomic_fetch_add_explicit(&team->next, piece, memory_order_relaxed);
    *to = least(*from + piece, total);
    return *from < total;
}

enum { PIECES = 3, STREAMS = 4, MOST_BLOCKS = 64 }; /* for each thread; row blocks that kernels like to have at once */

/* Blocks of 16 outputs [from, to) of all weights, one behind the other; of gate and up together. */
static void linear_piece(dn_team *team, const dn_command *c, const dn_input *in, float *tile,
                         int64_t from, int64_t to)
{
    const dn_kernels *kernels = team->kernels;
    int gated = (c->flags & DN_SWIGLU_OUT) != 0;
    int64_t begin = 0;
    for (int32_t i = 0; i < c->count; i++) {
        const dn_weight *w = c->w[i];
        int64_t here = (w->n + 15) / 16;
        int32_t first = (int32_t)(from > begin ? from - begin : 0), last = least(to - begin, here);
        float *y = gated ? c->out[i + 1] : c->out[i];
        if (!gated) begin += here;
        if (first >= last) continue;
        kernels->linear(w, in, y, first, last, c->flags, tile);
        int32_t at = 16 * first, width = least(16 * last, w->n) - at;
        for (int64_t row = 0; row < in->rows; row++) {
            float *part = y + row * w->n + at;
            if (c->bias[i]) kernels->add(part, part, c->bias[i] + at, width);
            if (gated && i == 1) kernels->swiglu(c->out[0] + row * w->n + at, c->out[1] + row * w->n + at, part, width);
            if (c->residual) kernels->add(part, c->residual + row * w->n + at, part, width);
            if (!gated) check(team, c, part, width);
            else if (i == 1) check(team, c, c->out[0] + row * w->n + at, width);
        }
    }
}

static void run_linear(dn_team *team, const dn_command *c, int32_t thread)
{
    dn_input in = prepare(team, c, thread);
    int64_t blocks = 0, from, to;
    for (int32_t i = 0; i < (c->flags & DN_SWIGLU_OUT ? 1 : c->count); i++) blocks += (c->w[i]->n + 15) / 16;
    int64_t piece = blocks / (PIECES * team->threads) / STREAMS * STREAMS;
    if (piece < STREAMS) piece = STREAMS;
    if (piece > MOST_BLOCKS) piece = MOST_BLOCKS;
    while (take(team, blocks, piece, &from, &to)) linear_piece(team, c, &in, team->scratch[thread].tile, from, to);
}

static void run_rope(dn_team *team, const dn_command *c, int32_t thread)
{
    int32_t dim = c->head_dim, half = dim / 2, rows = rows_of(team, c);
    int32_t from = share(rows, thread, team->threads), to = share(rows, thread + 1, team->threads);
    for (int64_t t = from; t < to; t++) {
        const float *cosine = angle_table(team, 0, half) + t * half, *sine = angle_table(team, 1, half) + t * half;
        float *q = c->out[0] + t * c->heads * dim, *k = c->out[1] + t * c->kv_heads * dim;
        team->kernels->rope(q, c->x + t * c->heads * dim, cosine, sine, c->heads, dim);
        team->kernels->rope(k, c->x2 + t * c->kv_heads * dim, cosine, sine, c->kv_heads, dim);
        check(team, c, q, c->heads * dim);
        check(team, c, k, c->kv_heads * dim);
        if (c->out[2])
            team->kernels->rope(c->out[2] + t * c->heads * dim, c->x + t * c->heads * dim,
                                angle_table(team, 2, half) + t * half,
                                angle_table(team, 3, half) + t * half, c->heads, dim);
    }
}

static void append(dn_team *team, const dn_command *c, int64_t t, int32_t head, const float *k, const float *v)
{
    int64_t slot = team->step->slots[t];
    int32_t lost = team->kernels->append(c->cache, 0, slot, head, k);
    lost += team->kernels->append(c->cache, 1, slot, head, v);
    if (lost) bad(team, c, lost);
}

/* Keys and values are shared out by heads, for all rows of a step: two slots of a head may lie in
 * the two halves of the same bytes. */
static void run_append(dn_team *team, const dn_command *c, int32_t thread)
{
    int32_t from = share(c->kv_heads, thread, team->threads), rows = rows_of(team, c);
    int32_t to = share(c->kv_heads, thread + 1, team->threads);
    for (int32_t head = from; head < to; head++)
        for (int64_t t = 0; t < rows; t++) {
            int64_t at = (t * c->kv_heads + head) * c->head_dim;
            append(team, c, t, head, c->x + at, c->x2 + at);
        }
}

/* Queries of one row and key/value head, scaled by 1/√D and, when fused, rotated. */
static void queries(dn_team *team, const dn_command *c, int64_t t, int32_t head, float *q, float *prefix)
{
    int32_t dim = c->head_dim, half = dim / 2, group = c->heads / c->kv_heads;
    int64_t at = (t * c->heads + (int64_t)head * group) * dim;
    float scale = 1.0f / sqrtf((float)dim);
    if (c->flags & DN_FUSED) {
        team->kernels->rope(q, c->x + at, angle_table(team, 0, half) + t * half,
                            angle_table(team, 1, half) + t * half, group, dim);
        if (c->keep)
            team->kernels->rope(prefix, c->x + at, angle_table(team, 2, half) + t * half,
                                angle_table(team, 3, half) + t * half, group, dim);
    } else {
        memcpy(q, c->x + at, sizeof(float) * (size_t)(group * dim));
        if (c->keep) memcpy(prefix, c->x4 + at, sizeof(float) * (size_t)(group * dim));
    }
    for (int32_t i = 0; i < group * dim; i++) {
        q[i] *= scale;
        if (c->keep) prefix[i] *= scale;
    }
}

static void rotate_and_append(dn_team *team, const dn_command *c, int64_t t, int32_t head, float *key)
{
    int32_t dim = c->head_dim, half = dim / 2;
    int64_t at = (t * c->kv_heads + head) * dim;
    team->kernels->rope(key, c->x2 + at, angle_table(team, 0, half) + t * half,
                        angle_table(team, 1, half) + t * half, 1, dim);
    append(team, c, t, head, key, c->x3 + at);
}

static void finish_heads(dn_team *team, const dn_command *c, int64_t t, int32_t head, const float *parts,
                         int32_t chunks, int64_t stride)
{
    int32_t dim = c->head_dim, group = c->heads / c->kv_heads;
    for (int32_t h = 0; h < group; h++) {
        float *out = c->out[0] + (t * c->heads + (int64_t)head * group + h) * dim;
        team->kernels->combine(out, parts + h * (dim + 2), chunks, stride, dim);
        check(team, c, out, dim);
    }
}

/* Work is split into (row, key/value head, chunk of slots). The chunks are the same for any number
 * of threads, and are put together in order. */
static void run_attention(dn_team *team, const dn_command *c, int32_t thread)
{
    dn_scratch *own = &team->scratch[thread];
    int32_t rows = rows_of(team, c), dim = c->head_dim, group = c->heads / c->kv_heads;
    int64_t part = (int64_t)group * (dim + 2), longest = 0;
    const int64_t *visible = team->step->visible, *starts = team->step->starts;
    float *q = own->heads, *prefix = c->keep ? own->heads + group * dim : NULL;
    float *key = own->heads + 2 * group * dim;
    int fused = (c->flags & DN_FUSED) != 0, split = rows <= DN_SPLIT_ROWS;
    for (int32_t t = 0; t < rows; t++) longest = visible[t] > longest ? visible[t] : longest;
    int32_t chunks = (int32_t)((longest + DN_CHUNK - 1) / DN_CHUNK);
    if (fused && rows > 1) { /* later rows see what earlier ones append; by heads: see run_append */
        int32_t head = share(c->kv_heads, thread, team->threads);
        for (; head < share(c->kv_heads, thread + 1, team->threads); head++)
            for (int32_t t = 0; t < rows; t++) rotate_and_append(team, c, t, head, key);
        dn_barrier(team);
    }
    int64_t items = (int64_t)rows * c->kv_heads * (split ? chunks : 1), last = -1, from, to;
    int64_t piece = items / (PIECES * team->threads); /* chunks in a row: each asks for the next */
    while (take(team, items, piece ? piece : 1, &from, &to)) {
        for (int64_t i = from; i < to; i++) {
            int64_t pair = split ? i / chunks : i, t = pair / c->kv_heads;
            int32_t head = (int32_t)(pair % c->kv_heads), chunk = split ? (int32_t)(i % chunks) : 0;
            int32_t slots = (int32_t)visible[t], count = (slots + DN_CHUNK - 1) / DN_CHUNK;
            int32_t end = split ? chunk + 1 : c->flags & DN_PADDED ? chunks : count;
            if (pair != last) queries(team, c, t, head, q, prefix);
            last = pair;
            for (; chunk < end; chunk++) {
                int32_t begin = chunk * DN_CHUNK, stop = least(begin + DN_CHUNK, slots);
                float *parts = own->parts + (int64_t)chunk * part;
                if (split) parts = team->shared.parts + ((t * c->kv_heads + head) * team->max_chunks + chunk) * part;
                if (begin >= slots) { /* nothing of this row: padding, where it is asked for */
                    if (c->flags & DN_PADDED)
                        team->kernels->attend(c->cache, starts[t], head, group, q, prefix, c->keep, begin,
                                              least(begin + DN_CHUNK, longest), own->scores, parts);
                    continue;
                }
                int64_t slot = team->step->slots ? team->step->slots[t] - starts[t] : -1;
                if (fused && rows == 1 && slot >= begin && slot < stop) rotate_and_append(team, c, t, head, key);
                team->kernels->attend(c->cache, starts[t], head, group, q, prefix, c->keep, begin, stop,
                                      own->scores, parts);
            }
            if (!split) finish_heads(team, c, t, head, own->parts, count, part);
        }
    }
    if (!split) return;
    dn_barrier(team);
    items = (int64_t)rows * c->kv_heads;
    for (int64_t i = share(items, thread, team->threads); i < share(items, thread + 1, team->threads); i++) {
        int32_t count = (int32_t)((visible[i / c->kv_heads] + DN_CHUNK - 1) / DN_CHUNK);
        finish_heads(team, c, i / c->kv_heads, (int32_t)(i % c->kv_heads),
                     team->shared.parts + i * team->max_chunks * part, count, part);
    }
}

static void run_elements(dn_team *team, const dn_command *c, int32_t thread)
{
    /* shares of whole vectors, so that a share's edge never changes the arithmetic of an element */
    int64_t n = (int64_t)rows_of(team, c) * c->width, lines = (n + 15) / 16;
    int64_t from = 16 * (int64_t)share(lines, thread, team->threads);
    int64_t to = 16 * (int64_t)share(lines, thread + 1, team->threads);
    if (to > n) to = n;
    if (from >= to) return;
    float *out = c->out[0] + from;
    if (c->kind == DN_ADD) team->kernels->add(out, c->x + from, c->x2 + from, (int32_t)(to - from));
    else team->kernels->swiglu(out, c->x + from, c->x2 + from, (int32_t)(to - from));
    check(team, c, out, (int32_t)(to - from));
}

static void run_select(dn_team *team, const dn_command *c, int32_t thread)
{
    int32_t from = share(team->step->rows, thread, team->threads);
    int32_t to = share(team->step->rows, thread + 1, team->threads);
    for (int64_t r = from; r < to; r++)
        memcpy(c->out[0] + r * c->width, c->x + team->step->row_index[r] * c->width,
               sizeof(float) * (size_t)c->width);
}

void dn_work(dn_team *team, int32_t thread)
{
    int traced = thread == 0 && team->ring != NULL;
    int64_t before = traced ? dn_now_ns() : 0;
    for (int32_t i = 0; i < team->count; i++) {
        const dn_command *c = &team->commands[i];
        atomic_store_explicit(&team->places[thread].op, c->name, memory_order_relaxed);
        switch (c->kind) {
        case DN_EMBED: run_embed(team, c, thread); break;
        case DN_RMSNORM: run_rmsnorm(team, c, thread); break;
        case DN_LINEAR: run_linear(team, c, thread); break;
        case DN_ROPE: run_rope(team, c, thread); break;
        case DN_KV_APPEND: run_append(team, c, thread); break;
        case DN_ATTENTION: run_attention(team, c, thread); break;
        case DN_SELECT: run_select(team, c, thread); break;
        default: run_elements(team, c, thread);
        }
        if (i + 1 < team->count) dn_barrier(team); /* after the last one the caller waits */
        if (traced && (i + 1 == team->count || team->commands[i + 1].op != c->op)) {
            int64_t now = dn_now_ns();
            team->ring[*team->recorded % team->capacity] = (dn_event){team->trace_step, c->op, before, now};
            (*team->recorded)++;
            before = now;
        }
        /* A faster thread may have stopped at a later command already: that one is still to come. */
        int32_t stop = atomic_load_explicit(&team->stop, memory_order_relaxed);
        if (stop && stop <= i + 1) return;
    }
}
