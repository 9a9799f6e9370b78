/* Makes calls of the C library fail or wait on request, in every process of a trial of job=chaos.
 *
 * Loaded by LD_PRELOAD. A file that all processes of the trial and the one that disturbs them have in memory says what
 * happens (struct control); dtf/jobs/chaos/preload.py writes it. While `mode` is 0 a call costs one load from memory.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OFF = 0, FULL = 1, FAIL = 2, SLOW = 3 };

struct control {
    _Atomic int32_t mode;
    int32_t error;              /* errno of a call that fails */
    _Atomic int64_t countdown;  /* FAIL: so many calls still work, then `failures` fail */
    _Atomic int64_t failures;   /* FAIL: calls that still fail */
    int64_t delay_us;           /* SLOW: before each call */
    _Atomic int64_t clock_ns;   /* added to the clock of the day */
    _Atomic int64_t hits;       /* calls that failed or waited */
    char prefixes[2][4096];     /* the folders to which all this applies; `clock_ns` applies always */
};

static struct control *control;

__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("DTF_CHAOS_CONTROL");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *memory = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (memory != MAP_FAILED) control = memory;
}

#define REAL(type, name, ...)                                  \
    static type (*real)(__VA_ARGS__);                          \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static int under(const char *path) {
    for (int i = 0; i < 2; i++) {
        const char *prefix = control->prefixes[i];
        size_t length = strlen(prefix);
        if (length && !strncmp(path, prefix, length) && (path[length] == '/' || !path[length])) return 1;
    }
    return 0;
}

static int concerns_fd(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return under(path);
}

static int concerns_path(int folder, const char *path) {
    char whole[4096 + 4096], base[4096] = "";
    if (path[0] != '/') {
        if (folder == AT_FDCWD) {
            if (!getcwd(base, sizeof base)) return 0;
        } else {
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            ssize_t length = readlink(link, base, sizeof base - 1);
            if (length <= 0) return 0;
            base[length] = 0;
        }
    }
    snprintf(whole, sizeof whole, "%s%s%s", base, base[0] ? "/" : "", path);
    return under(whole);
}

/* Whether this call fails; it has waited where calls are slow. `grows`: it needs room on the disk. */
static int fails(int grows) {
    switch (atomic_load(&control->mode)) {
    case FULL:
        if (!grows) return 0;
        break;
    case FAIL:
        if (atomic_fetch_sub(&control->countdown, 1) > 0) return 0;
        if (atomic_fetch_sub(&control->failures, 1) <= 0) return 0;
        break;
    case SLOW: {
        struct timespec pause = {control->delay_us / 1000000, control->delay_us % 1000000 * 1000};
        atomic_fetch_add(&control->hits, 1);
        nanosleep(&pause, NULL);
        return 0;
    }
    default:
        return 0;
    }
    atomic_fetch_add(&control->hits, 1);
    errno = control->error;
    return 1;
}

#define ACTIVE (control && atomic_load(&control->mode) != OFF)
#define ON_FD(fd, grows) if (ACTIVE && concerns_fd(fd) && fails(grows)) return -1
#define ON_PATH(folder, path, grows) if (ACTIVE && concerns_path(folder, path) && fails(grows)) return -1

ssize_t write(int fd, const void *data, size_t size) {
    REAL(ssize_t, "write", int, const void *, size_t);
    if (ACTIVE && concerns_fd(fd) && fails(1)) {
        /* a disk that gets full takes a part of a large write first */
        if (atomic_load(&control->mode) == FULL && size > 65536) return real(fd, data, size / 2);
        return -1;
    }
    return real(fd, data, size);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    REAL(ssize_t, "pwrite", int, const void *, size_t, off_t);
    ON_FD(fd, 1);
    return real(fd, data, size, at);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    REAL(ssize_t, "pwrite64", int, const void *, size_t, off64_t);
    ON_FD(fd, 1);
    return real(fd, data, size, at);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(ssize_t, "writev", int, const struct iovec *, int);
    ON_FD(fd, 1);
    return real(fd, parts, count);
}

int fsync(int fd) {
    REAL(int, "fsync", int);
    ON_FD(fd, 0);
    return real(fd);
}

int fdatasync(int fd) {
    REAL(int, "fdatasync", int);
    ON_FD(fd, 0);
    return real(fd);
}

int ftruncate(int fd, off_t size) {
    REAL(int, "ftruncate", int, off_t);
    ON_FD(fd, 0);
    return real(fd, size);
}

int ftruncate64(int fd, off64_t size) {
    REAL(int, "ftruncate64", int, off64_t);
    ON_FD(fd, 0);
    return real(fd, size);
}

#define MODE                                                                             \
    __builtin_va_list more;                                                              \
    __builtin_va_start(more, flags);                                                     \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? __builtin_va_arg(more, mode_t) : 0;    \
    __builtin_va_end(more)

#define OPEN(name)                                                                              \
    int name(const char *path, int flags, ...) {                                                \
        REAL(int, #name, const char *, int, ...);                                               \
        MODE;                                                                                   \
        if (flags & (O_CREAT | O_WRONLY | O_RDWR)) ON_PATH(AT_FDCWD, path, flags & O_CREAT);    \
        return real(path, flags, mode);                                                         \
    }

#define OPENAT(name)                                                                          \
    int name(int folder, const char *path, int flags, ...) {                                  \
        REAL(int, #name, int, const char *, int, ...);                                        \
        MODE;                                                                                 \
        if (flags & (O_CREAT | O_WRONLY | O_RDWR)) ON_PATH(folder, path, flags & O_CREAT);    \
        return real(folder, path, flags, mode);                                               \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

int rename(const char *from, const char *to) {
    REAL(int, "rename", const char *, const char *);
    ON_PATH(AT_FDCWD, to, 0);
    return real(from, to);
}

int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    REAL(int, "renameat", int, const char *, int, const char *);
    ON_PATH(to_folder, to, 0);
    return real(from_folder, from, to_folder, to);
}

int mkdir(const char *path, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t);
    ON_PATH(AT_FDCWD, path, 1);
    return real(path, mode);
}

int mkdirat(int folder, const char *path, mode_t mode) {
    REAL(int, "mkdirat", int, const char *, mode_t);
    ON_PATH(folder, path, 1);
    return real(folder, path, mode);
}

int unlink(const char *path) {
    REAL(int, "unlink", const char *);
    ON_PATH(AT_FDCWD, path, 0);
    return real(path);
}

int unlinkat(int folder, const char *path, int flags) {
    REAL(int, "unlinkat", int, const char *, int);
    ON_PATH(folder, path, 0);
    return real(folder, path, flags);
}

int symlink(const char *target, const char *path) {
    REAL(int, "symlink", const char *, const char *);
    ON_PATH(AT_FDCWD, path, 1);
    return real(target, path);
}

int link(const char *from, const char *to) {
    REAL(int, "link", const char *, const char *);
    ON_PATH(AT_FDCWD, to, 1);
    return real(from, to);
}

int linkat(int from_folder, const char *from, int to_folder, const char *to, int flags) {
    REAL(int, "linkat", int, const char *, int, const char *, int);
    ON_PATH(to_folder, to, 1);
    return real(from_folder, from, to_folder, to, flags);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(int, "clock_gettime", clockid_t, struct timespec *);
    int result = real(clock, now);
    if (!result && control && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t at = now->tv_sec * 1000000000LL + now->tv_nsec + atomic_load(&control->clock_ns);
        now->tv_sec = at / 1000000000LL;
        now->tv_nsec = at % 1000000000LL;
    }
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec at;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &at);
    now->tv_sec = at.tv_sec;
    now->tv_usec = at.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (result) *result = at.tv_sec;
    return at.tv_sec;
}
