/* The team of threads that runs a command list: the caller and its helpers, which wait by spinning
 * briefly, then yielding, then sleeping, so that a shared CPU is not burnt. */
#ifndef DN_TEAM_H
#define DN_TEAM_H
#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "dn.h"

/* Room for one row's work, of one thread. */
typedef struct {
    float *x;      /* (k,) normalised */
    int8_t *q;     /* (k,) */
    float *s;      /* (k/32,) */
    int32_t *t;    /* (k/16,) */
    float *u;      /* (k/32,) */
    float *tile;   /* (k, 16) */
    float *heads;  /* (2 G + 1, D) rotated queries, prefix queries, key */
    float *scores; /* (4, DN_CHUNK) */
    float *parts;  /* (chunks, G, D + 2) */
} dn_scratch;

/* Room that the team shares, for several rows. */
typedef struct {
    float *x;     /* (T, k) */
    int8_t *q;    /* (T, k) */
    float *s;     /* (T, k/32) */
    int32_t *t;   /* (T, k/16) */
    float *u;     /* (T, k/32) */
    float *parts; /* (T ≤ DN_SPLIT_ROWS, H, chunks, D + 2) */
    float *angles; /* (4, T, D/2): cosines, sines, and both for the prefix */
} dn_shared;

/* Attention of up to so many rows is split over slots too; more rows are work enough alone. */
enum { DN_SPLIT_ROWS = 16 };

/* Where a thread is, for the record of a crash; in a cache line of its own. */
typedef struct {
    _Atomic pid_t thread; /* the system's number of it */
    _Atomic int32_t op;   /* name of the op at hand, as dn_crash_name gave it; 0: none */
    char apart[64 - sizeof(pid_t) - sizeof(int32_t)];
} dn_place;

struct dn_team {
    int32_t threads;
    dn_place *places;
    pid_t process; /* that its helpers live in */
    const dn_kernels *kernels;
    /* the step in hand */
    const dn_command *commands;
    int32_t count;
    dn_step *step;
    _Atomic int32_t stop; /* a command met bad numbers: its index + 1 */
    _Atomic int64_t next; /* piece of work that nobody has taken yet */
    _Atomic int32_t overflow; /* keys and values that did not fit */
    /* waiting */
    _Atomic uint32_t generation, arrived, phase;
    _Atomic int32_t sleepers, quit;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    pthread_t *helpers;
    int32_t started;
    /* memory */
    dn_scratch *scratch;
    dn_shared shared;
    void **blocks;
    int32_t block_count;
    dn_needs reserved;
    int32_t max_chunks;
    /* trace */
    dn_event *ring;
    int64_t capacity, trace_step;
    int64_t *recorded;
};

void dn_barrier(dn_team *);
int64_t dn_now_ns(void);
void dn_work(dn_team *, int32_t thread); /* run.c: this thread's share of the step */
pid_t dn_thread_id(void);
void dn_crash_team(dn_team *, int alive); /* crash.c: a team begins or ends */
#endif
