/* fail.c - makes chosen calls of libc fail: preloaded (LD_PRELOAD) into a process under test.
 *
 * Nothing fails before the process calls fail_arm(). Then every call of the armed kinds that comes
 * from code of the armed module is counted, and those with the numbers nth to nth + width - 1 fail.
 * A site is a place in the code: the addresses of the innermost callers. With a site, only calls
 * from there count. Linux with glibc. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <link.h>
#include <netdb.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { RANGES_MAX = 16, SITES_MAX = 4096, DEPTH = 5, SKIPPED = 2 };

enum {
    MEMORY = 1 << 0, MAPPING = 1 << 1, SOCKET = 1 << 2, PAIR = 1 << 3, EVENT = 1 << 4,
    ACCEPT = 1 << 5, CONNECT = 1 << 6, LOOKUP = 1 << 7, THREAD = 1 << 8, BIND = 1 << 9,
    LISTEN = 1 << 10, EPOLL = 1 << 11, DIRECTORY = 1 << 12, SEND = 1 << 13, RECEIVE = 1 << 14,
    J_OPEN = 1 << 15, J_WRITE = 1 << 16, J_SYNC = 1 << 17, J_TRUNCATE = 1 << 18
};

struct site {
    uint64_t name;
    unsigned long calls;
    char text[200];
};

static struct {
    unsigned kinds;
    uint64_t site;
    unsigned long nth, width;
    int error;
    int sites_wanted;
    int n_ranges;                    /* 0: any module */
    uintptr_t begin[RANGES_MAX], end[RANGES_MAX];
    char module[64];
    char marker[64];                 /* part of the path of the journal */
} armed;

static volatile int on;
static unsigned long seen, hits;
static struct site sites[SITES_MAX];
static int n_sites;
static volatile int site_lock;
static __thread int inside __attribute__((tls_model("initial-exec")));

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

static void *real(const char *name)
{
    return dlsym(RTLD_NEXT, name);
}

/* ---- what counts, and what fails ---- */

static int add_module(struct dl_phdr_info *info, size_t size, void *unused)
{
    char self[512];
    const char *path = info->dlpi_name, *base;
    ssize_t length;
    int i;
    (void)size;
    (void)unused;
    if (path == NULL || *path == '\0') {
        length = readlink("/proc/self/exe", self, sizeof(self) - 1);
        self[length < 0 ? 0 : length] = '\0';
        path = self;
    }
    base = strrchr(path, '/') != NULL ? strrchr(path, '/') + 1 : path;
    if (strstr(base, armed.module) == NULL)
        return 0;
    for (i = 0; i < info->dlpi_phnum && armed.n_ranges < RANGES_MAX; i++)
        if (info->dlpi_phdr[i].p_type == PT_LOAD && (info->dlpi_phdr[i].p_flags & PF_X)) {
            uintptr_t begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
            armed.begin[armed.n_ranges] = begin;
            armed.end[armed.n_ranges++] = begin + info->dlpi_phdr[i].p_memsz;
        }
    return 0;
}

/* Arms. `module`: part of a file's name, or "" for any; `site`: 0 for any; `nth` counts from 1, 0
 * never comes. `sites_wanted`: notes all sites. `marker`: part of the path of the journal. Returns
 * 0, or -1 where there is no such module. */
int fail_arm(unsigned kinds, const char *module, uint64_t site, unsigned long nth,
             unsigned long width, int error, int sites_wanted, const char *marker)
{
    void *frames[2];
    on = 0;
    (void)backtrace(frames, 2);      /* it allocates the first time */
    memset(&armed, 0, sizeof(armed));
    snprintf(armed.module, sizeof(armed.module), "%s", module);
    snprintf(armed.marker, sizeof(armed.marker), "%s", marker);
    armed.kinds = kinds;
    armed.site = site;
    armed.nth = nth;
    armed.width = width;
    armed.error = error;
    armed.sites_wanted = sites_wanted;
    if (*module != '\0') {
        (void)dl_iterate_phdr(add_module, NULL);
        if (armed.n_ranges == 0)
            return -1;
    }
    seen = hits = 0;
    n_sites = 0;
    on = 1;
    return 0;
}

void fail_disarm(void)
{
    on = 0;
}

unsigned long fail_seen(void)
{
    return seen;
}

unsigned long fail_hits(void)
{
    return hits;
}

int fail_sites(void)
{
    return n_sites;
}

uint64_t fail_site(int index, unsigned long *calls, const char **text)
{
    *calls = sites[index].calls;
    *text = sites[index].text;
    return sites[index].name;
}

static uint64_t name_of(void *const *frames, int n, char *text, size_t size)
{
    uint64_t name = 14695981039346656037u;
    size_t used = 0;
    Dl_info info;
    int i;
    for (i = SKIPPED; i < n; i++) {
        uintptr_t offset = 0;
        const char *base = "?", *symbol = "";
        if (dladdr(frames[i], &info) != 0) {
            offset = (uintptr_t)frames[i] - (uintptr_t)info.dli_fbase;
            base = strrchr(info.dli_fname, '/') ? strrchr(info.dli_fname, '/') + 1 : base;
            symbol = info.dli_sname != NULL ? info.dli_sname : symbol;
        }
        name = (name ^ offset) * 1099511628211u;
        if (used + 1 < size)
            used += (size_t)snprintf(text + used, size - used, "%.8s+%lx%s%.24s ", base,
                                     (unsigned long)offset, *symbol ? ":" : "", symbol);
    }
    return name;
}

/* The number of this call among those of its site. */
static unsigned long note_site(uint64_t name, const char *text)
{
    unsigned long number = 0;
    int i;
    while (__atomic_exchange_n(&site_lock, 1, __ATOMIC_ACQUIRE))
        continue;
    for (i = 0; i < n_sites && sites[i].name != name; i++)
        continue;
    if (i < SITES_MAX) {
        if (i == n_sites) {
            sites[i].name = name;
            sites[i].calls = 0;
            snprintf(sites[i].text, sizeof(sites[i].text), "%s", text);
            n_sites++;
        }
        number = ++sites[i].calls;
    }
    __atomic_store_n(&site_lock, 0, __ATOMIC_RELEASE);
    return number;
}

static int counts(const void *from)
{
    int i;
    for (i = 0; i < armed.n_ranges; i++)
        if ((uintptr_t)from >= armed.begin[i] && (uintptr_t)from < armed.end[i])
            return 1;
    return armed.n_ranges == 0;
}

/* Whether this call is to fail. */
static __attribute__((noinline)) int due(unsigned kind, const void *from)
{
    void *frames[DEPTH + SKIPPED];
    char text[200] = "";
    unsigned long number;
    uint64_t name = 0;
    int n, keep = errno, failing;
    if (!on || !(armed.kinds & kind) || inside || !counts(from))
        return 0;
    number = __atomic_add_fetch(&seen, 1, __ATOMIC_RELAXED);
    if (armed.sites_wanted || armed.site != 0) {
        unsigned long there;
        inside = 1;
        n = backtrace(frames, DEPTH + SKIPPED);
        name = name_of(frames, n, text, sizeof(text));
        there = note_site(name, text);
        inside = 0;
        if (armed.site != 0)
            number = name == armed.site ? there : 0;
    }
    failing = number != 0 && number >= armed.nth && number - armed.nth < armed.width;
    failing = failing && armed.nth != 0;
    if (failing)
        (void)__atomic_add_fetch(&hits, 1, __ATOMIC_RELAXED);
    errno = failing ? armed.error : keep;
    return failing;
}

#define DUE(kind) due(kind, __builtin_return_address(0))

static int of_journal(int fd)
{
    char link[64], path[512];
    ssize_t length;
    int keep = errno;
    if (!on || inside)
        return 0;
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    length = readlink(link, path, sizeof(path) - 1);
    errno = keep;
    path[length < 0 ? 0 : length] = '\0';
    return strstr(path, armed.marker) != NULL;
}

/* ---- memory ---- */

void *malloc(size_t size)
{
    return DUE(MEMORY) ? NULL : __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    return DUE(MEMORY) ? NULL : __libc_calloc(count, size);
}

void *realloc(void *old, size_t size)
{
    return DUE(MEMORY) ? NULL : __libc_realloc(old, size);
}

int posix_memalign(void **found, size_t alignment, size_t size)
{
    if (DUE(MEMORY))
        return ENOMEM;
    *found = __libc_memalign(alignment, size);
    return *found == NULL ? ENOMEM : 0;
}

/* operator new; to fail is to ask the real one for what there cannot be, as C cannot throw */
void *_Znwm(size_t size)
{
    void *library, *found, *(*next)(size_t);
    if (!DUE(MEMORY) && (found = __libc_malloc(size ? size : 1)) != NULL)
        return found;
    library = dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD);
    next = library != NULL ? (void *(*)(size_t))dlsym(library, "_Znwm") : NULL;
    if (next == NULL)
        abort();
    return next((size_t)PTRDIFF_MAX);
}

void *_ZnwmRKSt9nothrow_t(size_t size, const void *tag)
{
    (void)tag;
    return DUE(MEMORY) ? NULL : __libc_malloc(size ? size : 1);
}

void *_ZnamRKSt9nothrow_t(size_t size, const void *tag)
{
    (void)tag;
    return DUE(MEMORY) ? NULL : __libc_malloc(size ? size : 1);
}

void *mmap(void *where, size_t size, int protection, int flags, int fd, off_t offset)
{
    static void *(*next)(void *, size_t, int, int, int, off_t);
    if (DUE(MAPPING))
        return MAP_FAILED;
    if (next == NULL)
        next = (void *(*)(void *, size_t, int, int, int, off_t))real("mmap");
    return next(where, size, protection, flags, fd, offset);
}

void *mmap64(void *where, size_t size, int protection, int flags, int fd, off64_t offset)
{
    static void *(*next)(void *, size_t, int, int, int, off64_t);
    if (DUE(MAPPING))
        return MAP_FAILED;
    if (next == NULL)
        next = (void *(*)(void *, size_t, int, int, int, off64_t))real("mmap64");
    return next(where, size, protection, flags, fd, offset);
}

/* ---- descriptors, addresses, threads ---- */

#define WRAP(kind, failed, type, name, parameters, arguments)          \
    type name parameters                                              \
    {                                                                 \
        static type (*next) parameters;                               \
        if (DUE(kind))                                                \
            return failed;                                            \
        if (next == NULL)                                             \
            next = (type(*) parameters)real(#name);                   \
        return next arguments;                                        \
    }

WRAP(SOCKET, -1, int, socket, (int domain, int type, int protocol), (domain, type, protocol))
WRAP(PAIR, -1, int, socketpair, (int domain, int type, int protocol, int pair[2]),
     (domain, type, protocol, pair))
WRAP(PAIR, -1, int, pipe, (int pair[2]), (pair))
WRAP(PAIR, -1, int, pipe2, (int pair[2], int flags), (pair, flags))
WRAP(EVENT, -1, int, eventfd, (unsigned value, int flags), (value, flags))
WRAP(EPOLL, -1, int, epoll_create1, (int flags), (flags))
WRAP(ACCEPT, -1, int, accept, (int fd, struct sockaddr *address, socklen_t *size),
     (fd, address, size))
WRAP(ACCEPT, -1, int, accept4, (int fd, struct sockaddr *address, socklen_t *size, int flags),
     (fd, address, size, flags))
WRAP(CONNECT, -1, int, connect, (int fd, const struct sockaddr *address, socklen_t size),
     (fd, address, size))
WRAP(BIND, -1, int, bind, (int fd, const struct sockaddr *address, socklen_t size),
     (fd, address, size))
WRAP(LISTEN, -1, int, listen, (int fd, int backlog), (fd, backlog))
WRAP(LOOKUP, armed.error, int, getaddrinfo,
     (const char *host, const char *service, const struct addrinfo *hints, struct addrinfo **found),
     (host, service, hints, found))
WRAP(THREAD, armed.error, int, pthread_create,
     (pthread_t * thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument),
     (thread, attributes, run, argument))
WRAP(DIRECTORY, -1, int, mkdir, (const char *path, mode_t mode), (path, mode))

/* ---- connections: those over TCP are reset, for both sides ---- */

static inline __attribute__((always_inline)) int resets(unsigned kind, const void *from, int fd)
{
    struct sockaddr_storage address;
    struct linger at_once = {1, 0};
    socklen_t size = sizeof(address);
    int keep = errno;
    if (!on || !(armed.kinds & kind) || inside)
        return 0;
    if (getsockname(fd, (struct sockaddr *)&address, &size) != 0 || address.ss_family == AF_UNIX) {
        errno = keep;
        return 0;
    }
    errno = keep;
    if (!due(kind, from))
        return 0;
    (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    (void)shutdown(fd, SHUT_RDWR);
    errno = armed.error;
    return 1;
}

ssize_t send(int fd, const void *data, size_t size, int flags)
{
    static ssize_t (*next)(int, const void *, size_t, int);
    if (resets(SEND, __builtin_return_address(0), fd))
        return -1;
    if (next == NULL)
        next = (ssize_t(*)(int, const void *, size_t, int))real("send");
    return next(fd, data, size, flags);
}

ssize_t recv(int fd, void *data, size_t size, int flags)
{
    static ssize_t (*next)(int, void *, size_t, int);
    if (resets(RECEIVE, __builtin_return_address(0), fd))
        return -1;
    if (next == NULL)
        next = (ssize_t(*)(int, void *, size_t, int))real("recv");
    return next(fd, data, size, flags);
}

/* ---- the journal's files ---- */

#define OPEN(name)                                                                    \
    int name(const char *path, int flags, ...)                                        \
    {                                                                                 \
        static int (*next)(const char *, int, ...);                                   \
        va_list rest;                                                                 \
        mode_t mode;                                                                  \
        va_start(rest, flags);                                                        \
        mode = va_arg(rest, mode_t);                                                  \
        va_end(rest);                                                                 \
        if (on && strstr(path, armed.marker) != NULL && DUE(J_OPEN))                  \
            return -1;                                                                \
        if (next == NULL)                                                             \
            next = (int (*)(const char *, int, ...))real(#name);                      \
        return next(path, flags, mode);                                               \
    }

OPEN(open)
OPEN(open64)

#define JOURNAL(kind, type, name, parameters, arguments)                              \
    type name parameters                                                              \
    {                                                                                 \
        static type (*next) parameters;                                               \
        if (on && (armed.kinds & (kind)) && of_journal(fd) && DUE(kind))              \
            return -1;                                                                \
        if (next == NULL)                                                             \
            next = (type(*) parameters)real(#name);                                   \
        return next arguments;                                                        \
    }

JOURNAL(J_WRITE, ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size))
JOURNAL(J_WRITE, ssize_t, pwrite, (int fd, const void *data, size_t size, off_t offset),
        (fd, data, size, offset))
JOURNAL(J_WRITE, ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t offset),
        (fd, data, size, offset))
JOURNAL(J_SYNC, int, fsync, (int fd), (fd))
JOURNAL(J_SYNC, int, fdatasync, (int fd), (fd))
JOURNAL(J_TRUNCATE, int, ftruncate, (int fd, off_t size), (fd, size))
JOURNAL(J_TRUNCATE, int, ftruncate64, (int fd, off64_t size), (fd, size))
