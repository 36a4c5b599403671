/* Makes system calls fail: preloaded, and told by `inject_arm` which call below a directory shall fail, and how.

   Calls are counted by kind, from 1, over all threads. glibc's own calls cannot be caught, so a C stream (NumPy's
   `tofile`) fails where it is flushed or closed: its buffer is thrown away, as it is when the write in there fails. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdio_ext.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE, OPEN, WRITE, SYNC, RENAME, UNLINK, MKDIR, RMDIR, MMAP, TRUNCATE, STREAM, KINDS };
enum { SHORT = -1 };

static char below[PATH_MAX];
static size_t below_length;
static int armed_kind = -1, armed_code;
static long armed_number;
static int armed_lasting;
static atomic_int armed;
static atomic_long calls[KINDS], hits;
static int log_file = -1;

void inject_arm(const char *directory, int kind, long number, int code, int lasting) {
    strncpy(below, directory, sizeof below - 1);
    below_length = strlen(below);
    armed_kind = kind, armed_number = number, armed_code = code, armed_lasting = lasting;
    for (int i = 0; i < KINDS; i++) atomic_store(&calls[i], 0);
    atomic_store(&hits, 0);
    atomic_store(&armed, 1);
}

void inject_log(int file) { log_file = file; } /* one line a call: its kind and its file; -1: no more */
void inject_off(void) { atomic_store(&armed, 0); }
long inject_hits(void) { return atomic_load(&hits); }

static int is_below(const char *path) {
    return !strncmp(path, below, below_length) && (path[below_length] == '/' || !path[below_length]);
}

static int link_target(const char *link, char *target) {
    ssize_t length = syscall(SYS_readlink, link, target, PATH_MAX - 1);
    if (length >= 0) target[length] = 0;
    return length >= 0;
}

/* whether this call shall fail; `path` is relative to `directory`, NULL for the file `directory` itself */
static int fails(int kind, int directory, const char *path) {
    if (!atomic_load(&armed)) return 0;
    int before = errno, ours;
    char link[64], target[PATH_MAX] = "";
    if (path && path[0] == '/') {
        ours = is_below(path);
    } else {
        snprintf(link, sizeof link, directory == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", directory);
        ours = link_target(link, target) && is_below(target);
    }
    if (ours && log_file >= 0) dprintf(log_file, "%d %s/%s\n", kind, target, path ? path : "");
    errno = before;
    if (!ours) return 0;
    long number = atomic_fetch_add(&calls[kind], 1) + 1;
    if (kind != armed_kind || number < armed_number || (number > armed_number && !armed_lasting)) return 0;
    atomic_fetch_add(&hits, 1);
    if (armed_code != SHORT) errno = armed_code;
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPENS(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        if (fails(flags & O_CREAT ? CREATE : OPEN, AT_FDCWD, path)) return -1; \
        return REAL(name)(path, flags, mode); \
    }
#define OPENS_AT(name) \
    int name(int directory, const char *path, int flags, ...) { \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        if (fails(flags & O_CREAT ? CREATE : OPEN, directory, path)) return -1; \
        return REAL(name)(directory, path, flags, mode); \
    }
OPENS(open) OPENS(open64) OPENS_AT(openat) OPENS_AT(openat64)

static size_t part_of(size_t size) { return size > 1 ? size / 2 : size; }

#define WRITES(name, offset_type) \
    ssize_t name(int file, const void *data, size_t size, offset_type offset) { \
        if (fails(WRITE, file, NULL)) { if (armed_code != SHORT) return -1; size = part_of(size); } \
        return REAL(name)(file, data, size, offset); \
    }
ssize_t write(int file, const void *data, size_t size) {
    if (fails(WRITE, file, NULL)) { if (armed_code != SHORT) return -1; size = part_of(size); }
    return REAL(write)(file, data, size);
}
WRITES(pwrite, off_t) WRITES(pwrite64, off64_t)

ssize_t writev(int file, const struct iovec *pieces, int count) {
    if (fails(WRITE, file, NULL)) { if (armed_code != SHORT) return -1; count = count > 1 ? 1 : count; }
    return REAL(writev)(file, pieces, count);
}
#define WRITES_MANY(name, offset_type) \
    ssize_t name(int file, const struct iovec *pieces, int count, offset_type offset) { \
        if (fails(WRITE, file, NULL)) { if (armed_code != SHORT) return -1; count = count > 1 ? 1 : count; } \
        return REAL(name)(file, pieces, count, offset); \
    }
WRITES_MANY(pwritev, off_t) WRITES_MANY(pwritev64, off64_t)

ssize_t copy_file_range(int from, off64_t *from_at, int to, off64_t *to_at, size_t size, unsigned flags) {
    if (fails(WRITE, to, NULL)) { if (armed_code != SHORT) return -1; size = part_of(size); }
    return REAL(copy_file_range)(from, from_at, to, to_at, size, flags);
}

int fsync(int file) { return fails(SYNC, file, NULL) ? -1 : REAL(fsync)(file); }
int fdatasync(int file) { return fails(SYNC, file, NULL) ? -1 : REAL(fdatasync)(file); }

int rename(const char *from, const char *to) {
    return fails(RENAME, AT_FDCWD, to) ? -1 : REAL(rename)(from, to);
}
int renameat(int from_at, const char *from, int to_at, const char *to) {
    return fails(RENAME, to_at, to) ? -1 : REAL(renameat)(from_at, from, to_at, to);
}
int renameat2(int from_at, const char *from, int to_at, const char *to, unsigned flags) {
    return fails(RENAME, to_at, to) ? -1 : REAL(renameat2)(from_at, from, to_at, to, flags);
}
int link(const char *from, const char *to) { return fails(RENAME, AT_FDCWD, to) ? -1 : REAL(link)(from, to); }
int linkat(int from_at, const char *from, int to_at, const char *to, int flags) {
    return fails(RENAME, to_at, to) ? -1 : REAL(linkat)(from_at, from, to_at, to, flags);
}

int unlink(const char *path) { return fails(UNLINK, AT_FDCWD, path) ? -1 : REAL(unlink)(path); }
int unlinkat(int directory, const char *path, int flags) {
    return fails(flags & AT_REMOVEDIR ? RMDIR : UNLINK, directory, path) ? -1 : REAL(unlinkat)(directory, path, flags);
}
int rmdir(const char *path) { return fails(RMDIR, AT_FDCWD, path) ? -1 : REAL(rmdir)(path); }
int mkdir(const char *path, mode_t mode) { return fails(MKDIR, AT_FDCWD, path) ? -1 : REAL(mkdir)(path, mode); }
int mkdirat(int directory, const char *path, mode_t mode) {
    return fails(MKDIR, directory, path) ? -1 : REAL(mkdirat)(directory, path, mode);
}

#define MAPS(name, offset_type) \
    void *name(void *at, size_t size, int protection, int flags, int file, offset_type offset) { \
        if (file >= 0 && fails(MMAP, file, NULL)) return MAP_FAILED; \
        return REAL(name)(at, size, protection, flags, file, offset); \
    }
MAPS(mmap, off_t) MAPS(mmap64, off64_t)

#define TRUNCATES(name, offset_type) \
    int name(int file, offset_type size) { return fails(TRUNCATE, file, NULL) ? -1 : REAL(name)(file, size); }
TRUNCATES(ftruncate, off_t) TRUNCATES(ftruncate64, off64_t)

#define ALLOCATES(name, offset_type) \
    int name(int file, offset_type offset, offset_type size) { \
        int before = errno; \
        if (!fails(TRUNCATE, file, NULL)) return REAL(name)(file, offset, size); \
        errno = before; \
        return armed_code; \
    }
ALLOCATES(posix_fallocate, off_t) ALLOCATES(posix_fallocate64, off64_t)

static int stream_fails(FILE *stream) {
    if (!stream || !__fwritable(stream) || !fails(STREAM, fileno(stream), NULL)) return 0;
    __fpurge(stream);
    return errno;
}
int fflush(FILE *stream) {
    int code = stream_fails(stream);
    if (!code) return REAL(fflush)(stream);
    errno = code;
    return EOF;
}
int fclose(FILE *stream) {
    int code = stream_fails(stream);
    int result = REAL(fclose)(stream);
    if (!code) return result;
    errno = code;
    return EOF;
}
