/* What does not belong to a step: features, touching memory, bandwidth, the best token. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "team.h"

#if defined(__linux__)
#include <sys/auxv.h>
#endif

uint64_t dn_hwcap(int32_t n)
{
#if defined(__linux__)
    return n == 2 ? getauxval(AT_HWCAP2) : getauxval(AT_HWCAP);
#else
    (void)n;
    return 0;
#endif
}

void dn_sizes(int64_t sizes[5])
{
    sizes[0] = sizeof(dn_weight);
    sizes[1] = sizeof(dn_cache);
    sizes[2] = sizeof(dn_command);
    sizes[3] = sizeof(dn_step);
    sizes[4] = sizeof(dn_event);
}

uint64_t dn_touch(const void *start, int64_t bytes, int64_t page)
{
    uint64_t sum = 0;
    for (int64_t i = 0; i < bytes; i += page) sum += ((const volatile uint8_t *)start)[i];
    return sum;
}

typedef struct { const uint8_t *from; int64_t bytes; int32_t streams, prefetch; uint64_t sum; } dn_reading;

static void *reading(void *argument)
{
    dn_reading *r = argument;
    int64_t each = r->bytes / r->streams / 256 * 256;
    uint64_t sums[32] = {0};
    for (int64_t at = 0; at < each; at += 256)
        for (int32_t s = 0; s < r->streams; s++) {
            const uint8_t *p = r->from + s * each + at;
            uint64_t words[32];
            if (r->prefetch)
                for (int line = 0; line < 4; line++) __builtin_prefetch(p + r->prefetch + 64 * line);
            memcpy(words, p, 256);
            for (int i = 0; i < 32; i++) sums[i] += words[i];
        }
    for (int i = 0; i < 32; i++) r->sum += sums[i];
    return NULL;
}

int32_t dn_read_bandwidth(int32_t threads, int64_t bytes, int32_t streams, int32_t prefetch, int32_t huge,
                          int32_t passes, double *rates)
{
    if (threads < 1 || threads > 256 || streams < 1 || bytes < 4096) return -1;
    uint8_t *memory = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return -1;
#if defined(MADV_HUGEPAGE)
    madvise(memory, (size_t)bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#else
    (void)huge;
#endif
    memset(memory, 1, (size_t)bytes);
    int32_t failed = 0;
    for (int32_t pass = 0; pass < passes && !failed; pass++) {
        pthread_t ids[256];
        dn_reading jobs[256];
        int32_t started = 0;
        int64_t each = bytes / threads / 64 * 64, begin = dn_now_ns();
        for (int32_t i = 0; i < threads; i++) {
            jobs[i] = (dn_reading){memory + i * each, each, streams, prefetch, 0};
            if (i + 1 < threads && pthread_create(&ids[i], NULL, reading, &jobs[i])) break;
            started = i + (i + 1 < threads);
        }
        if (started == threads - 1) reading(&jobs[threads - 1]);
        for (int32_t i = 0; i < started; i++) pthread_join(ids[i], NULL);
        rates[pass] = (double)(each * threads) / (double)(dn_now_ns() - begin);
        failed = started != threads - 1;
    }
    munmap(memory, (size_t)bytes);
    return failed ? -1 : 0;
}
