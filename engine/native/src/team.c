#if defined(__linux__)
#define _GNU_SOURCE
#include <sched.h>
#endif
#include "team.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SPIN_NS = 50000, YIELD_NS = 2000000, NAP_NS = 50000 };

#if defined(__x86_64__)
extern const dn_kernels dn_kernels_generic, dn_kernels_avx2, dn_kernels_avx512;
static const dn_kernels *const tables[] = {&dn_kernels_generic, &dn_kernels_avx2, &dn_kernels_avx512};
#elif defined(__aarch64__)
extern const dn_kernels dn_kernels_generic, dn_kernels_neon, dn_kernels_dotprod, dn_kernels_i8mm;
static const dn_kernels *const tables[] = {&dn_kernels_generic, &dn_kernels_neon, &dn_kernels_dotprod,
                                           &dn_kernels_i8mm};
#else
extern const dn_kernels dn_kernels_generic;
static const dn_kernels *const tables[] = {&dn_kernels_generic};
#endif
enum { TABLES = sizeof tables / sizeof *tables };

const char *dn_isas(void)
{
#if defined(__x86_64__)
    return "generic,avx2,avx512";
#elif defined(__aarch64__)
    return "generic,neon,dotprod,i8mm";
#else
    return "generic";
#endif
}

int64_t dn_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Spin, then yield, until `*word` is no longer `old`; 0 when it still is after that. */
static int changed(_Atomic uint32_t *word, uint32_t old)
{
    int64_t until = dn_now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < 64; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != old) return 1;
            relax();
        }
    } while (dn_now_ns() < until);
    until = dn_now_ns() + YIELD_NS; /* whoever else wants this CPU gets it */
    do {
        sched_yield();
        if (atomic_load_explicit(word, memory_order_acquire) != old) return 1;
    } while (dn_now_ns() < until);
    return 0;
}

void dn_barrier(dn_team *team)
{
    if (team->threads == 1) {
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        return;
    }
    uint32_t phase = atomic_load_explicit(&team->phase, memory_order_acquire);
    uint32_t arrived = atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) + 1;
    if (arrived == (uint32_t)team->threads) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        atomic_store_explicit(&team->phase, phase + 1, memory_order_release);
        return;
    }
    while (!changed(&team->phase, phase)) {
        struct timespec nap = {0, NAP_NS}; /* the others were preempted: leave them the CPU */
        nanosleep(&nap, NULL);
    }
}

typedef struct { dn_team *team; int32_t thread, cpu; } dn_start;

static void pin(int32_t cpu)
{
#if defined(__linux__)
    if (cpu < 0) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET((size_t)cpu, &set);
    sched_setaffinity(0, sizeof set, &set); /* a CPU that is not allowed leaves the mask as it is */
#else
    (void)cpu;
#endif
}

static void *helper(void *argument)
{
    dn_start start = *(dn_start *)argument;
    free(argument);
    dn_team *team = start.team;
    pin(start.cpu);
    atomic_store(&team->places[start.thread].thread, dn_thread_id());
    uint32_t seen = 0;
    for (;;) {
        if (!changed(&team->generation, seen)) {
            pthread_mutex_lock(&team->mutex);
            atomic_fetch_add(&team->sleepers, 1);
            while (atomic_load(&team->generation) == seen) pthread_cond_wait(&team->wake, &team->mutex);
            atomic_fetch_sub(&team->sleepers, 1);
            pthread_mutex_unlock(&team->mutex);
        }
        seen = atomic_load_explicit(&team->generation, memory_order_acquire);
        if (atomic_load(&team->quit)) return NULL;
        dn_work(team, start.thread);
        dn_barrier(team);
    }
}

static void wake_all(dn_team *team)
{
    atomic_fetch_add(&team->generation, 1);
    if (atomic_load(&team->sleepers) > 0) {
        pthread_mutex_lock(&team->mutex);
        pthread_cond_broadcast(&team->wake);
        pthread_mutex_unlock(&team->mutex);
    }
}

dn_team *dn_team_create(int32_t threads, const int32_t *cpus, const char *isa)
{
    const dn_kernels *kernels = NULL;
    for (int i = 0; i < TABLES; i++)
        if (!strcmp(tables[i]->isa, isa)) kernels = tables[i];
    if (!kernels || threads < 1) return NULL;
    dn_team *team = calloc(1, sizeof *team);
    if (!team) return NULL;
    team->threads = threads;
    team->process = getpid();
    team->kernels = kernels;
    pthread_mutex_init(&team->mutex, NULL);
    pthread_cond_init(&team->wake, NULL);
    team->helpers = calloc((size_t)threads, sizeof *team->helpers);
    team->scratch = calloc((size_t)threads, sizeof *team->scratch);
    team->blocks = calloc((size_t)threads + 1, sizeof *team->blocks);
    team->places = calloc((size_t)threads, sizeof *team->places);
    if (!team->helpers || !team->scratch || !team->blocks || !team->places) {
        dn_team_destroy(team);
        return NULL;
    }
    for (int32_t i = 1; i < threads; i++) {
        dn_start *start = malloc(sizeof *start);
        if (start) *start = (dn_start){team, i, cpus ? cpus[i] : -1};
        if (!start || pthread_create(&team->helpers[i], NULL, helper, start)) {
            free(start);
            dn_team_destroy(team);
            return NULL;
        }
        team->started = i;
    }
    dn_crash_team(team, 1);
    return team;
}

void dn_team_destroy(dn_team *team)
{
    if (!team) return;
    dn_crash_team(team, 0);
    if (team->process == getpid()) { /* a forked child has no helpers, and locks as they were */
        atomic_store(&team->quit, 1);
        wake_all(team);
        for (int32_t i = 1; i <= team->started; i++) pthread_join(team->helpers[i], NULL);
        pthread_mutex_destroy(&team->mutex);
        pthread_cond_destroy(&team->wake);
    }
    for (int32_t i = 0; team->blocks && i < team->block_count; i++) free(team->blocks[i]);
    free(team->blocks);
    free(team->scratch);
    free(team->helpers);
    free(team->places);
    free(team);
}

int32_t dn_team_threads(const dn_team *team) { return team->threads; }

void dn_trace(dn_team *team, dn_event *ring, int64_t capacity, int64_t *recorded, int64_t step)
{
    team->ring = ring;
    team->capacity = capacity;
    team->recorded = recorded;
    team->trace_step = step;
}

/* --- memory --------------------------------------------------------------------------------- */

static int64_t up(int64_t bytes) { return (bytes + 127) / 128 * 128; }

/* Carve aligned pieces out of a block; with block NULL only the size is counted. */
static void *carve(uint8_t *block, int64_t *at, int64_t bytes)
{
    void *piece = block ? block + *at : NULL;
    *at += up(bytes);
    return piece;
}

static int64_t lay_scratch(dn_scratch *s, uint8_t *block, const dn_needs *n, int64_t chunks)
{
    int64_t at = 0;
    s->x = carve(block, &at, n->k * 4);
    s->q = carve(block, &at, n->k);
    s->s = carve(block, &at, n->k / 32 * 4);
    s->t = carve(block, &at, n->k / 16 * 4);
    s->u = carve(block, &at, n->k / 32 * 4);
    s->tile = carve(block, &at, n->k * 64);
    s->heads = carve(block, &at, (2 * n->group + 1) * n->dim * 4);
    s->scores = carve(block, &at, 4 * DN_CHUNK * 4);
    s->parts = carve(block, &at, chunks * n->group * (n->dim + 2) * 4);
    return at;
}

static int64_t lay_shared(dn_shared *s, uint8_t *block, const dn_needs *n, int64_t chunks, int64_t tokens)
{
    int64_t at = 0, split = tokens < DN_SPLIT_ROWS ? tokens : DN_SPLIT_ROWS;
    s->x = carve(block, &at, tokens * n->k * 4);
    s->q = carve(block, &at, tokens * n->k);
    s->s = carve(block, &at, tokens * n->k / 32 * 4);
    s->t = carve(block, &at, tokens * n->k / 16 * 4);
    s->u = carve(block, &at, tokens * n->k / 32 * 4);
    s->parts = carve(block, &at, split * n->heads * chunks * (n->dim + 2) * 4);
    s->angles = carve(block, &at, 4 * tokens * n->dim / 2 * 4);
    return at;
}

int32_t dn_reserve(dn_team *team, const dn_needs *needs)
{
    dn_needs n = *needs;
    int64_t tokens = n.tokens;
    n.k = (n.k + 31) / 32 * 32;
    int64_t chunks = (n.slots + DN_CHUNK - 1) / DN_CHUNK;
    dn_scratch own;
    dn_shared shared;
    int64_t own_bytes = lay_scratch(&own, NULL, &n, chunks);
    int64_t shared_bytes = lay_shared(&shared, NULL, &n, chunks, tokens);
    for (int32_t i = 0; i < team->block_count; i++) free(team->blocks[i]);
    team->block_count = 0;
    team->reserved = (dn_needs){0}; /* nothing runs until all of it is there */
    for (int32_t i = 0; i <= team->threads; i++) {
        void *block = NULL;
        int64_t bytes = i < team->threads ? own_bytes : shared_bytes;
        if (posix_memalign(&block, 128, (size_t)bytes)) return -1;
        team->blocks[team->block_count++] = block;
        if (i < team->threads) lay_scratch(&team->scratch[i], block, &n, chunks);
        else lay_shared(&team->shared, block, &n, chunks, tokens);
    }
    team->reserved = n;
    team->max_chunks = (int32_t)chunks;
    return 0;
}

/* --- a step --------------------------------------------------------------------------------- */

int32_t dn_start_step(dn_team *team); /* run.c */

int32_t dn_run(dn_team *team, const dn_command *commands, int32_t count, dn_step *step)
{
    if (step->tokens > team->reserved.tokens || step->rows > team->reserved.tokens) return DN_TOO_LARGE;
    if (team->threads > 1 && team->process != getpid()) return DN_FORKED;
    team->commands = commands;
    team->count = count;
    team->step = step;
    step->bad_op = -1;
    step->overflow = 0;
    atomic_store(&team->stop, 0);
    atomic_store(&team->next, 0);
    atomic_store(&team->overflow, 0);
    int32_t refused = dn_start_step(team);
    if (refused) return refused;
    if (team->threads > 1) wake_all(team);
    atomic_store_explicit(&team->places[0].thread, dn_thread_id(), memory_order_relaxed);
    dn_work(team, 0);
    dn_barrier(team);
    atomic_store_explicit(&team->places[0].op, 0, memory_order_relaxed);
    step->overflow = atomic_load(&team->overflow);
    return atomic_load(&team->stop) ? DN_STOPPED : 0;
}
