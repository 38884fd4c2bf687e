/* What a fatal signal leaves for those who look for its cause: a record, written by the dying
 * process itself. Core files are often not to be had (no space, another program takes them, an
 * emulator), a descriptor that was opened before always is.
 *
 * Everything here runs inside a signal handler: system calls and static memory alone (see
 * signal-safety(7)). Memory that may not be there is read by writing it to a pipe, which answers
 * EFAULT where a load would fault again. Then the handler that was there before (faulthandler's)
 * gets the same signal. The record's lines are read by harness/triage/record.py. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "team.h"

extern const char dn_build_hash[]; /* of what this library was made of; the build's own file */

enum {
    CODE_BEFORE = 32, CODE_BYTES = 64, /* around the program counter */
    STACK_BYTES = 16384,
    MAPS_BYTES = 96 << 10,
    PIECE = 256,
    TEAMS = 64,
    NAMES_BYTES = 64 << 10,
    SIGNALS = 65
};
static const int fatal[] = {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGABRT, SIGTRAP};
enum { FATAL = sizeof fatal / sizeof *fatal };

static int record = -1, probe[2] = {-1, -1};
static pid_t owner;
static struct sigaction before[SIGNALS];
static atomic_flag taken = ATOMIC_FLAG_INIT;
static _Atomic int written;
static _Atomic(dn_team *) teams[TEAMS];
static char names[NAMES_BYTES];
static int32_t names_end = 1; /* offset 0 is the empty name */

/* --- which op a thread is at ----------------------------------------------------------------- */

pid_t dn_thread_id(void)
{
#if defined(SYS_gettid)
    return (pid_t)syscall(SYS_gettid);
#else
    return getpid();
#endif
}

void dn_crash_team(dn_team *team, int alive)
{
    for (int i = 0; i < TEAMS; i++) {
        dn_team *expected = alive ? NULL : team;
        if (atomic_compare_exchange_strong(&teams[i], &expected, alive ? team : NULL)) return;
    }
}

int32_t dn_crash_name(const char *id)
{
    size_t bytes = strlen(id) + 1;
    if ((size_t)names_end + bytes > NAMES_BYTES) return 0;
    int32_t at = names_end;
    memcpy(names + at, id, bytes);
    names_end += (int32_t)bytes;
    return at;
}

static const char *op_of(pid_t thread)
{
    for (int i = 0; i < TEAMS; i++) {
        dn_team *team = atomic_load(&teams[i]);
        for (int32_t k = 0; team && k < team->threads; k++) {
            int32_t at = atomic_load(&team->places[k].op);
            if (atomic_load(&team->places[k].thread) == thread && at > 0 && at < NAMES_BYTES) return names + at;
        }
    }
    return "";
}

/* --- text ------------------------------------------------------------------------------------ */

static char buffer[4096];
static size_t filled;

static void flush(void)
{
    for (size_t done = 0; done < filled;) {
        ssize_t n = write(record, buffer + done, filled - done);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break; /* a full disk: the rest is lost, the signal goes on */
        done += (size_t)n;
    }
    filled = 0;
}

static void put(char c)
{
    if (filled == sizeof buffer) flush();
    buffer[filled++] = c;
}

static void text(const char *s) { while (*s) put(*s++); }

static void hex(uint64_t value, int digits)
{
    for (int i = digits - 1; i >= 0; i--) put("0123456789abcdef"[value >> 4 * i & 15]);
}

static void address(uint64_t value)
{
    int digits = 1;
    while (digits < 16 && value >> 4 * digits) digits++;
    text("0x");
    hex(value, digits);
}

static void decimal(int64_t value)
{
    char digits[20];
    int n = 0;
    uint64_t left = value < 0 ? 0 - (uint64_t)value : (uint64_t)value;
    if (value < 0) put('-');
    do digits[n++] = (char)('0' + left % 10); while (left /= 10);
    while (n) put(digits[--n]);
}

static void line(const char *name, uint64_t value)
{
    text(name);
    put(' ');
    address(value);
    put('\n');
}

/* --- memory that may not be there ------------------------------------------------------------ */

/* Bytes of [from, from + bytes) that can be read, at most PIECE; 0 when the first cannot. A bare
 * system call: a sanitiser's `write` would look at what it is given before the kernel does. */
static size_t peek(uint64_t from, uint8_t *to, size_t bytes)
{
    long n;
    if (bytes > PIECE) bytes = PIECE;
    do n = syscall(SYS_write, probe[1], (const void *)(uintptr_t)from, bytes); while (n < 0 && errno == EINTR);
    if (n <= 0) return 0;
    ssize_t got;
    do got = read(probe[0], to, (size_t)n); while (got < 0 && errno == EINTR);
    return got == n ? (size_t)n : 0;
}

static void memory(const char *name, uint64_t from, size_t bytes)
{
    static uint8_t piece[PIECE];
    text(name);
    put(' ');
    address(from);
    put(' ');
    for (size_t done = 0; done < bytes;) {
        size_t wanted = bytes - done, page = 4096 - (from + done) % 4096;
        if (wanted > page) wanted = page; /* the next page may not be there */
        size_t n = peek(from + done, piece, wanted);
        for (size_t i = 0; i < n; i++) hex(piece[i], 2);
        if (!n) break;
        done += n;
    }
    put('\n');
}

static void copy_maps(void)
{
    static char piece[PIECE];
    int file = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    text("maps\n");
    if (file < 0) return;
    char last = '\n';
    for (size_t done = 0; done < MAPS_BYTES;) {
        ssize_t n = read(file, piece, sizeof piece);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        for (ssize_t i = 0; i < n; i++) put(last = piece[i]);
        done += (size_t)n;
    }
    if (last != '\n') put('\n');
    close(file);
}

/* --- registers ------------------------------------------------------------------------------- */

#if defined(__linux__) && defined(__x86_64__)
static const char machine_text[] = "x86_64";
static const struct { const char *name; int at; } registers[] = {
    {"rax", REG_RAX}, {"rdx", REG_RDX}, {"rcx", REG_RCX}, {"rbx", REG_RBX}, {"rsi", REG_RSI},
    {"rdi", REG_RDI}, {"rbp", REG_RBP}, {"rsp", REG_RSP}, {"r8", REG_R8}, {"r9", REG_R9},
    {"r10", REG_R10}, {"r11", REG_R11}, {"r12", REG_R12}, {"r13", REG_R13}, {"r14", REG_R14},
    {"r15", REG_R15}, {"rip", REG_RIP}, {"eflags", REG_EFL}, {"err", REG_ERR}, {"trapno", REG_TRAPNO},
};
static void dump(const ucontext_t *c, uint64_t *pc, uint64_t *sp)
{
    for (size_t i = 0; i < sizeof registers / sizeof *registers; i++) {
        text("register ");
        line(registers[i].name, (uint64_t)c->uc_mcontext.gregs[registers[i].at]);
    }
    *pc = (uint64_t)c->uc_mcontext.gregs[REG_RIP];
    *sp = (uint64_t)c->uc_mcontext.gregs[REG_RSP];
}
#elif defined(__linux__) && defined(__aarch64__)
static const char machine_text[] = "aarch64";
static void dump(const ucontext_t *c, uint64_t *pc, uint64_t *sp)
{
    for (int i = 0; i < 31; i++) {
        text("register x");
        decimal(i);
        put(' ');
        address(c->uc_mcontext.regs[i]);
        put('\n');
    }
    *pc = c->uc_mcontext.pc;
    *sp = c->uc_mcontext.sp;
    text("register ");
    line("sp", *sp);
    text("register ");
    line("pstate", c->uc_mcontext.pstate);
    /* A list of {magic, size, …}: arch/arm64/include/uapi/asm/sigcontext.h */
    const uint8_t *at = (const uint8_t *)&c->uc_mcontext.__reserved;
    for (size_t left = sizeof c->uc_mcontext.__reserved; left >= 16;) {
        uint32_t head[2];
        memcpy(head, at, sizeof head);
        if (!head[0] || head[1] < 16 || head[1] > left) break;
        if (head[0] == 0x45535201) { /* ESR_MAGIC */
            uint64_t esr;
            memcpy(&esr, at + 8, sizeof esr);
            line("esr", esr);
        }
        at += head[1];
        left -= head[1];
    }
}
#else
static const char machine_text[] = "other";
static void dump(const ucontext_t *c, uint64_t *pc, uint64_t *sp)
{
    (void)c;
    *pc = *sp = 0;
}
#endif

/* --- the handler ----------------------------------------------------------------------------- */

static void tell(int number, const siginfo_t *info, const ucontext_t *context)
{
    uint64_t pc = 0, sp = 0;
    pid_t thread = dn_thread_id();
    text("crash-record 1\nmachine ");
    text(machine_text);
    text("\nbuild ");
    text(dn_build_hash);
    put('\n');
    line("anchor dn_isas", (uint64_t)(uintptr_t)&dn_isas);
    text("signal ");
    decimal(number);
    text("\ncode ");
    decimal(info->si_code);
    put('\n');
    if (info->si_code <= 0) {
        text("sender ");
        decimal(info->si_pid);
        put('\n');
    } else
        line("address", (uint64_t)(uintptr_t)info->si_addr);
    text("process ");
    decimal(getpid());
    text("\nthread ");
    decimal(thread);
    text("\nop ");
    text(op_of(thread));
    put('\n');
    dump(context, &pc, &sp);
    line("pc", pc);
    line("sp", sp);
    flush(); /* what matters most is out, whatever happens now */
    if (pc > CODE_BEFORE) memory("before", pc - CODE_BEFORE, CODE_BEFORE);
    memory("at", pc, CODE_BYTES);
    flush();
    copy_maps();
    flush();
    if (sp) memory("stack", sp, STACK_BYTES);
    text("end\n");
    flush();
}

static void on_signal(int number, siginfo_t *info, void *context)
{
    int error = errno;
    if (getpid() == owner) {
        if (!atomic_flag_test_and_set(&taken)) {
            tell(number, info, context);
            atomic_store(&written, 1);
        } else
            for (int i = 0; i < 2000 && !atomic_load(&written); i++) { /* another thread's: let it be told */
                struct timespec nap = {0, 1000000};
                nanosleep(&nap, NULL);
            }
    }
    sigaction(number, &before[number], NULL);
    /* A fault comes again as the same instruction is run again; what was sent has to be sent again. */
    if (info->si_code <= 0 || number == SIGABRT || number == SIGTRAP)
        syscall(SYS_tgkill, getpid(), dn_thread_id(), number);
    errno = error;
}

int32_t dn_crash_record(int32_t fd)
{
    static uint8_t stack[64 << 10]; /* for one that overflowed; faulthandler gives its own thread another */
    stack_t now;
    if (record >= 0 || fd < 0) return -1;
    if (pipe(probe)) return -1;
    for (int i = 0; i < 2; i++) {
        fcntl(probe[i], F_SETFD, FD_CLOEXEC);
        fcntl(probe[i], F_SETFL, O_NONBLOCK);
    }
    if (!sigaltstack(NULL, &now) && now.ss_flags & SS_DISABLE) {
        stack_t own = {.ss_sp = stack, .ss_size = sizeof stack, .ss_flags = 0};
        sigaltstack(&own, NULL);
    }
    record = fd;
    owner = getpid();
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigfillset(&action.sa_mask);
    for (int i = 0; i < FATAL; i++)
        if (sigaction(fatal[i], &action, &before[fatal[i]])) return -1;
    return 0;
}
