/* Put before the system's own calls on files (LD_PRELOAD), these fail where they are asked to.

   Calls on files below FAILING_FOLDER are counted. After `fail_calls`, `count` of them from the one of that number on
   fail with an errno; a negative one is a signal that ends the process there. While a file FAILING_SWITCH is there,
   all fail with the errno that is written in it, or wait until it is gone where it is empty. */
#define _GNU_SOURCE
#define _LARGEFILE64_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

static _Atomic long seen, first, end;
static int error_number;

void fail_calls(long from, long count, int number) {
    error_number = number;
    first = from;
    end = from + count;
    seen = 0;
}

long calls_seen(void) { return seen; }

/* The errno of FAILING_SWITCH, once that is not empty; 0 without it. */
static int switched(void) {
    const char *path = getenv("FAILING_SWITCH");
    FILE *file;
    while (path != NULL && (file = fopen(path, "r")) != NULL) {
        int number = 0, found = fscanf(file, "%d", &number);
        fclose(file);
        if (found == 1)
            return number;
        usleep(1000);
    }
    return 0;
}

/* Whether a call fails on `path`, or on the file of a descriptor where that is not absolute. */
static int fails(int descriptor, const char *path) {
    char link[64], found[4096] = "";
    const char *folder = getenv("FAILING_FOLDER");
    if (folder == NULL)
        return 0;
    if (path == NULL || path[0] != '/') {
        snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
        if (readlink(link, found, sizeof found - 1) < 0)
            return 0;
        path = found;
    }
    if (strncmp(path, folder, strlen(folder)))
        return 0;
    if ((errno = switched()) != 0)
        return 1;
    long number = seen++;
    if (number < first || number >= end)
        return 0;
    if (error_number < 0)
        kill(getpid(), -error_number);
    errno = error_number;
    return 1;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define CALL(type, name, failed, descriptor, path, parameters, arguments) \
    type name parameters { return fails(descriptor, path) ? (type)(failed) : NEXT(name) arguments; }

/* Each twice: with offsets of 64 bits it may have a name of its own. */
#define BOTH(type, name, failed, descriptor, path, parameters, arguments) \
    CALL(type, name, failed, descriptor, path, parameters, arguments) \
    CALL(type, name##64, failed, descriptor, path, parameters, arguments)

#define FILE_CALL(type, name, failed, parameters, arguments) BOTH(type, name, failed, file, NULL, parameters, arguments)

CALL(int, mkdir, -1, -1, path, (const char *path, mode_t mode), (path, mode))
CALL(int, unlinkat, -1, file, path, (int file, const char *path, int flags), (file, path, flags))
CALL(int, unlink, -1, -1, path, (const char *path), (path))
CALL(int, rename, -1, -1, from, (const char *from, const char *to), (from, to))
CALL(int, access, -1, -1, path, (const char *path, int how), (path, how))
CALL(int, fsync, -1, file, NULL, (int file), (file))
CALL(int, fdatasync, -1, file, NULL, (int file), (file))
CALL(ssize_t, read, -1, file, NULL, (int file, void *to, size_t size), (file, to, size))
CALL(ssize_t, write, -1, file, NULL, (int file, const void *from, size_t size), (file, from, size))
CALL(int, flock, -1, file, NULL, (int file, int how), (file, how))
CALL(int, fchown, -1, file, NULL, (int file, uid_t owner, gid_t group), (file, owner, group))
CALL(int, futimens, -1, file, NULL, (int file, const struct timespec times[2]), (file, times))
CALL(int, msync, -1, -1, getenv("FAILING_FOLDER"), (void *at, size_t size, int flags), (at, size, flags))
CALL(DIR *, opendir, NULL, -1, path, (const char *path), (path))
CALL(DIR *, fdopendir, NULL, file, NULL, (int file), (file))
CALL(int, statx, -1, file, path,
     (int file, const char *path, int flags, unsigned mask, struct statx *found), (file, path, flags, mask, found))
CALL(int, fstat, -1, file, NULL, (int file, struct stat *found), (file, found))
CALL(int, fstat64, -1, file, NULL, (int file, struct stat64 *found), (file, found))
CALL(int, fstatat64, -1, file, path,
     (int file, const char *path, struct stat64 *found, int flags), (file, path, found, flags))
CALL(int, stat, -1, -1, path, (const char *path, struct stat *found), (path, found))
CALL(int, stat64, -1, -1, path, (const char *path, struct stat64 *found), (path, found))
CALL(int, lstat, -1, -1, path, (const char *path, struct stat *found), (path, found))
CALL(int, statvfs, -1, -1, path, (const char *path, struct statvfs *found), (path, found))
CALL(int, statvfs64, -1, -1, path, (const char *path, struct statvfs64 *found), (path, found))
CALL(int, lstat64, -1, -1, path, (const char *path, struct stat64 *found), (path, found))
FILE_CALL(int, ftruncate, -1, (int file, off_t size), (file, size))
FILE_CALL(int, fallocate, -1, (int file, int mode, off_t at, off_t size), (file, mode, at, size))
FILE_CALL(ssize_t, pread, -1, (int file, void *to, size_t size, off_t at), (file, to, size, at))
FILE_CALL(ssize_t, pwrite, -1, (int file, const void *from, size_t size, off_t at), (file, from, size, at))
FILE_CALL(off_t, lseek, -1, (int file, off_t at, int from), (file, at, from))
FILE_CALL(void *, mmap, MAP_FAILED, (void *at, size_t size, int use, int flags, int file, off_t from),
          (at, size, use, flags, file, from))

/* What fails is closed too. */
int close(int file) {
    int failed = fails(file, NULL), closed = NEXT(close)(file);
    return failed ? -1 : closed;
}

/* With an argument that not every call has. */
#define LAST(before) \
    va_list rest; \
    va_start(rest, before); \
    long last = va_arg(rest, long); \
    va_end(rest)
#define CONTROLS(name) \
    int name(int file, int what, ...) { \
        LAST(what); \
        return fails(file, NULL) ? -1 : NEXT(name)(file, what, last); \
    }
CONTROLS(fcntl)
CONTROLS(fcntl64)

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        LAST(flags); \
        return fails(AT_FDCWD, path) ? -1 : NEXT(name)(path, flags, (mode_t)last); \
    }
#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        LAST(flags); \
        return fails(folder, path) ? -1 : NEXT(name)(folder, path, flags, (mode_t)last); \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
