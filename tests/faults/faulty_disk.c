/* A disk that fails on request, under a real process: preloaded before libc (LD_PRELOAD) into one broker.
 *
 * Problem: write errors, flush errors, a slow flush, a full disk and one that stands still have to reach RocksDB as the system would report
 * them, at any moment, for one member and not for the others.
 *
 * Idea: the calls that write and flush are wrapped. Each looks at one page of memory that is mapped from a file
 * (SERIATIM_DISK_CONTROL); whoever writes to that file steers the disk. Without trouble the cost is one look at memory.
 * Only files below SERIATIM_DISK_DIRECTORY are harmed, and each call that was harmed is counted in the page, so that a
 * test knows that its fault has struck.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { WRITE_ERROR = 1, FLUSH_ERROR = 2, SLOW_FLUSH = 3, FULL = 4, STILL_FLUSH = 5, STILL = 6 };

struct control {
    volatile int32_t trouble;
    volatile int32_t delay_ms;
    volatile int64_t hits;
};

static struct control none;
static struct control *control = &none;
static char directory[4096];
static size_t directory_length;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("SERIATIM_DISK_CONTROL"), *below = getenv("SERIATIM_DISK_DIRECTORY");
    if (path == NULL || below == NULL || strlen(below) >= sizeof directory) return;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *page = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (page == MAP_FAILED) return;
    strcpy(directory, below);
    directory_length = strlen(below);
    control = page;
}

static int is_below(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    return length > (ssize_t)directory_length && memcmp(path, directory, directory_length) == 0 &&
           path[directory_length] == '/';
}

static void hit(void) { __atomic_add_fetch(&control->hits, 1, __ATOMIC_SEQ_CST); }

/* Until the disk goes on: it neither does what it is told nor refuses it. */
static void wait_while(int trouble, int fd) {
    static const struct timespec pause = {0, 5000000L};
    if (control->trouble != trouble || !is_below(fd)) return;
    hit();
    while (control->trouble == trouble) nanosleep(&pause, NULL);
}

/* 0, or the error that a write to this file ends with now. */
static int write_trouble(int fd) {
    wait_while(STILL, fd);
    int trouble = control->trouble;
    if ((trouble != WRITE_ERROR && trouble != FULL) || !is_below(fd)) return 0;
    hit();
    return trouble == FULL ? ENOSPC : EIO;
}

static int flush_trouble(int fd) {
    wait_while(STILL, fd);
    wait_while(STILL_FLUSH, fd);
    int trouble = control->trouble;
    if ((trouble != FLUSH_ERROR && trouble != SLOW_FLUSH) || !is_below(fd)) return 0;
    hit();
    if (trouble == FLUSH_ERROR) return EIO;
    int32_t delay_ms = control->delay_ms;
    struct timespec delay = {delay_ms / 1000, (delay_ms % 1000) * 1000000L};
    nanosleep(&delay, NULL);
    return 0;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (real == NULL) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define FAIL_IF(trouble) \
    do { \
        int found = (trouble); \
        if (found != 0) { errno = found; return -1; } \
    } while (0)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    FAIL_IF(write_trouble(fd));
    return real(fd, data, size);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    FAIL_IF(write_trouble(fd));
    return real(fd, parts, count);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    REAL(pwrite);
    FAIL_IF(write_trouble(fd));
    return real(fd, data, size, offset);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    REAL(pwrite64);
    FAIL_IF(write_trouble(fd));
    return real(fd, data, size, offset);
}

int fdatasync(int fd) {
    REAL(fdatasync);
    FAIL_IF(flush_trouble(fd));
    return real(fd);
}

int fsync(int fd) {
    REAL(fsync);
    FAIL_IF(flush_trouble(fd));
    return real(fd);
}
