/* A stand-in for libnvidia-ml.so.1, driven by a script, for tests through the real Python binding.
 *
 * PAIRMESH_FAKE_NVML names the script, read again whenever the file is another one; PAIRMESH_FAKE_NVML_COUNTERS a file
 * in which every call is counted. Lines of the script, later ones win, '#' begins a comment:
 *
 *   driver V | nvml V | cuda N | count N
 *   gpu N key=value...       uuid name bus minor cc total reserved used (MiB) util display persistence addr buswidth
 *                            memclk; '-' makes the call answer "not supported"; '_' in a name stands for a space
 *   fail SYM [gpu=N] rc=C [after=K] [times=M]
 *   slow SYM [gpu=N] ms=T [after=K] [times=M]
 *   crash SYM [gpu=N] how=segv|abort [after=K] [times=M]
 *
 * SYM is a full name or '*'; 'after' counts matching calls. Build variants: -DNO_MEMV2, -DNO_ADDRESSING, -DNO_V3;
 * -DSTUB finds no driver whatever the script says, -DBROKEN ends its process.
 * Layouts as in NVIDIA's nvml.h for x86-64.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, MISMATCH = 25 };
enum { GPUS = 16, RULES = 64, COUNTED = 64, NEVER = -1 };
enum { F_MINOR, F_CC, F_TOTAL, F_RESERVED, F_USED, F_UTIL, F_DISPLAY, F_PERSISTENCE, F_ADDR, F_BUSWIDTH, F_MEMCLK, FIELDS };

static const char *const NAMES[FIELDS] = {"minor", "cc", "total", "reserved", "used", "util", "display",
                                          "persistence", "addr", "buswidth", "memclk"};
static const long long DEFAULTS[FIELDS] = {0, 89, 24576, 512, 0, 0, 0, 1, 0, 384, 10501};

typedef struct { char uuid[96], name[96], bus[32]; long long field[FIELDS]; } gpu_t;
typedef struct { char kind, symbol[64]; int gpu, rc, ms, segv; long after, times, seen; } rule_t;
typedef struct { char name[48]; uint64_t calls, last_ns; } counter_t;
typedef struct { char magic[8]; uint32_t entries; char pad[52]; counter_t entry[COUNTED]; } counters_t;

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned gpu, memory; } utilization_t;
typedef struct { unsigned version, value; } addressing_t;
typedef struct { char busIdLegacy[16]; unsigned domain, bus, device, pciDeviceId, pciSubSystemId; char busId[32]; } pci_t;
_Static_assert(sizeof(memory_t) == 24 && sizeof(memory_v2_t) == 40, "memory");
_Static_assert(offsetof(memory_v2_t, reserved) == 16 && offsetof(memory_v2_t, used) == 32, "memory v2");
_Static_assert(sizeof(pci_t) == 68 && offsetof(pci_t, busId) == 36, "pci");

static gpu_t gpus[GPUS];
static int present, listed, initialised;
static rule_t rules[RULES];
static int rule_count;
static char driver[64], nvml[64];
static int cuda;
static struct timespec read_at;
static ino_t read_inode;
static counters_t *counters;

static void broken(const char *line) {
    fprintf(stderr, "fake nvml: bad line: %s\n", line);
    abort();
}

static void parse_gpu(char *rest, const char *line) {
    int n, used;
    if (sscanf(rest, "%d %n", &n, &used) != 1 || n < 0 || n >= GPUS) broken(line);
    gpu_t *gpu = &gpus[n];
    if (n >= present) present = n + 1;
    for (char *word = strtok(rest + used, " \n"); word; word = strtok(NULL, " \n")) {
        char *value = strchr(word, '=');
        if (!value) broken(line);
        *value++ = 0;
        if (!strcmp(word, "uuid")) { snprintf(gpu->uuid, sizeof gpu->uuid, "%s", value); continue; }
        if (!strcmp(word, "bus")) { snprintf(gpu->bus, sizeof gpu->bus, "%s", value); continue; }
        if (!strcmp(word, "name")) {
            snprintf(gpu->name, sizeof gpu->name, "%s", value);
            for (char *c = gpu->name; *c; c++) if (*c == '_') *c = ' ';
            continue;
        }
        int field = 0;
        while (field < FIELDS && strcmp(word, NAMES[field])) field++;
        if (field == FIELDS) broken(line);
        gpu->field[field] = strcmp(value, "-") ? atoll(value) : NEVER;
    }
}

static void parse_rule(char kind, char *rest, const char *line) {
    if (rule_count == RULES) broken(line);
    rule_t *rule = &rules[rule_count++];
    *rule = (rule_t){.kind = kind, .gpu = -1, .times = -1};
    char *word = strtok(rest, " \n");
    if (!word) broken(line);
    snprintf(rule->symbol, sizeof rule->symbol, "%s", word);
    while ((word = strtok(NULL, " \n"))) {
        if (sscanf(word, "gpu=%d", &rule->gpu) == 1 || sscanf(word, "rc=%d", &rule->rc) == 1 ||
            sscanf(word, "ms=%d", &rule->ms) == 1 || sscanf(word, "after=%ld", &rule->after) == 1 ||
            sscanf(word, "times=%ld", &rule->times) == 1) continue;
        if (!strcmp(word, "how=segv")) { rule->segv = 1; continue; }
        if (strcmp(word, "how=abort")) broken(line);
    }
}

static void read_script(void) {
    const char *path = getenv("PAIRMESH_FAKE_NVML");
    struct stat seen;
    if (!path || stat(path, &seen)) return;
    if (seen.st_ino == read_inode && seen.st_mtim.tv_sec == read_at.tv_sec && seen.st_mtim.tv_nsec == read_at.tv_nsec) return;
    read_inode = seen.st_ino;
    read_at = seen.st_mtim;
    FILE *file = fopen(path, "r");
    if (!file) return;
    present = rule_count = 0;
    listed = -1;
    snprintf(driver, sizeof driver, "550.54.14");
    snprintf(nvml, sizeof nvml, "12.550.54.14");
    cuda = 12040;
    for (int n = 0; n < GPUS; n++) {
        snprintf(gpus[n].uuid, sizeof gpus[n].uuid, "GPU-00000000-0000-0000-0000-%012d", n);
        snprintf(gpus[n].name, sizeof gpus[n].name, "NVIDIA Fake %d", n);
        snprintf(gpus[n].bus, sizeof gpus[n].bus, "00000000:%02X:00.0", n + 1);
        memcpy(gpus[n].field, DEFAULTS, sizeof DEFAULTS);
        gpus[n].field[F_MINOR] = n;
    }
    char line[1024], copy[1024];
    while (fgets(line, sizeof line, file)) {
        if (line[0] == '#' || line[0] == '\n') continue;
        snprintf(copy, sizeof copy, "%s", line);
        char *rest = strchr(line, ' ');
        if (!rest) broken(copy);
        *rest++ = 0;
        if (!strcmp(line, "gpu")) parse_gpu(rest, copy);
        else if (!strcmp(line, "fail")) parse_rule('f', rest, copy);
        else if (!strcmp(line, "slow")) parse_rule('s', rest, copy);
        else if (!strcmp(line, "crash")) parse_rule('c', rest, copy);
        else if (!strcmp(line, "driver")) sscanf(rest, "%63s", driver);
        else if (!strcmp(line, "nvml")) sscanf(rest, "%63s", nvml);
        else if (!strcmp(line, "cuda")) cuda = atoi(rest);
        else if (!strcmp(line, "count")) listed = atoi(rest);
        else broken(copy);
    }
    fclose(file);
}

static void count_call(const char *symbol) {
    const char *path = getenv("PAIRMESH_FAKE_NVML_COUNTERS");
    if (!path) return;
    if (!counters) {
        int fd = open(path, O_RDWR | O_CREAT, 0600);
        if (fd < 0 || ftruncate(fd, sizeof *counters)) return;
        counters = mmap(NULL, sizeof *counters, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        if (counters == MAP_FAILED) { counters = NULL; return; }
        memcpy(counters->magic, "FNVC0001", 8);
    }
    uint32_t n = 0;
    while (n < counters->entries && strcmp(counters->entry[n].name, symbol)) n++;
    if (n == COUNTED) return;
    if (n == counters->entries) { snprintf(counters->entry[n].name, 48, "%s", symbol); counters->entries++; }
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    counters->entry[n].last_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    counters->entry[n].calls++;
}

/* Called first by every function: what the script says becomes of this call. */
static int enter(const char *symbol, int gpu) {
    read_script();
    count_call(symbol);
    int rc = OK;
    for (int n = 0; n < rule_count; n++) {
        rule_t *rule = &rules[n];
        if (strcmp(rule->symbol, "*") && strcmp(rule->symbol, symbol)) continue;
        if (rule->gpu >= 0 && rule->gpu != gpu) continue;
        if (rule->seen++ < rule->after) continue;
        if (rule->times >= 0 && rule->seen > rule->after + rule->times) continue;
        if (rule->kind == 'f') rc = rule->rc;
        if (rule->kind == 's') {
            struct timespec left = {rule->ms / 1000, (rule->ms % 1000) * 1000000L};
            while (nanosleep(&left, &left)) continue; /* a blocked ioctl does not end on a signal */
        }
        if (rule->kind == 'c') { if (rule->segv) raise(SIGSEGV); abort(); }
    }
    return rc;
}

#define ENTER(gpu) do { int rc_ = enter(__func__, (gpu)); if (rc_) return rc_; } while (0)
#define INDEX(handle) ((int)((gpu_t *)(handle) - gpus))
#define FIELD(handle, which) (((gpu_t *)(handle))->field[which])

static int put(long long value, unsigned *out) {
    if (value == NEVER) return NOT_SUPPORTED;
    *out = (unsigned)value;
    return OK;
}

#if defined STUB
int nvmlInitWithFlags(unsigned flags) { (void)flags; return 9; }
#elif defined BROKEN
int nvmlInitWithFlags(unsigned flags) { (void)flags; abort(); }
#else
int nvmlInitWithFlags(unsigned flags) { (void)flags; ENTER(-1); initialised++; return OK; }
#endif
int nvmlShutdown(void) { ENTER(-1); initialised--; return OK; }
const char *nvmlErrorString(int code) { (void)code; return "as the script says"; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { ENTER(-1); snprintf(out, size, "%s", driver); return OK; }
int nvmlSystemGetNVMLVersion(char *out, unsigned size) { ENTER(-1); snprintf(out, size, "%s", nvml); return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { ENTER(-1); *out = cuda; return OK; }
int nvmlDeviceGetCount_v2(unsigned *out) { ENTER(-1); *out = (unsigned)(listed >= 0 ? listed : present); return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
    ENTER((int)index);
    if (index >= (unsigned)present) return INVALID_ARGUMENT;
    *out = &gpus[index];
    return OK;
}

int nvmlDeviceGetUUID(void *gpu, char *out, unsigned size) {
    ENTER(INDEX(gpu));
    snprintf(out, size, "%s", ((gpu_t *)gpu)->uuid);
    return OK;
}

int nvmlDeviceGetName(void *gpu, char *out, unsigned size) {
    ENTER(INDEX(gpu));
    snprintf(out, size, "%s", ((gpu_t *)gpu)->name);
    return OK;
}

int nvmlDeviceGetPciInfo_v3(void *gpu, pci_t *out) {
    ENTER(INDEX(gpu));
    memset(out, 0, sizeof *out);
    snprintf(out->busId, sizeof out->busId, "%s", ((gpu_t *)gpu)->bus);
    return OK;
}

int nvmlDeviceGetPersistenceMode(void *gpu, unsigned *out) { ENTER(INDEX(gpu)); return put(FIELD(gpu, F_PERSISTENCE), out); }
int nvmlDeviceGetDisplayActive(void *gpu, unsigned *out) { ENTER(INDEX(gpu)); return put(FIELD(gpu, F_DISPLAY), out); }
int nvmlDeviceGetMemoryBusWidth(void *gpu, unsigned *out) { ENTER(INDEX(gpu)); return put(FIELD(gpu, F_BUSWIDTH), out); }

int nvmlDeviceGetMaxClockInfo(void *gpu, int kind, unsigned *out) {
    ENTER(INDEX(gpu));
    return kind == 2 ? put(FIELD(gpu, F_MEMCLK), out) : NOT_SUPPORTED;
}

int nvmlDeviceGetCudaComputeCapability(void *gpu, int *major, int *minor) {
    ENTER(INDEX(gpu));
    if (FIELD(gpu, F_CC) == NEVER) return NOT_SUPPORTED;
    *major = (int)FIELD(gpu, F_CC) / 10;
    *minor = (int)FIELD(gpu, F_CC) % 10;
    return OK;
}

int nvmlDeviceGetUtilizationRates(void *gpu, utilization_t *out) {
    ENTER(INDEX(gpu));
    out->memory = 0;
    return put(FIELD(gpu, F_UTIL), &out->gpu);
}

int nvmlDeviceGetMemoryInfo(void *gpu, memory_t *out) {
    ENTER(INDEX(gpu));
    if (FIELD(gpu, F_TOTAL) == NEVER) return NOT_SUPPORTED;
    out->total = (unsigned long long)FIELD(gpu, F_TOTAL) << 20;
    out->used = (unsigned long long)(FIELD(gpu, F_USED) + FIELD(gpu, F_RESERVED)) << 20;
    out->free = out->total - out->used;
    return OK;
}

#ifndef NO_MEMV2
int nvmlDeviceGetMemoryInfo_v2(void *gpu, memory_v2_t *out) {
    ENTER(INDEX(gpu));
    if (out->version != 0x02000028) return MISMATCH;
    if (FIELD(gpu, F_TOTAL) == NEVER) return NOT_SUPPORTED;
    out->total = (unsigned long long)FIELD(gpu, F_TOTAL) << 20;
    out->reserved = (unsigned long long)FIELD(gpu, F_RESERVED) << 20;
    out->used = (unsigned long long)FIELD(gpu, F_USED) << 20;
    out->free = out->total - out->used - out->reserved;
    return OK;
}
#endif

#ifndef NO_ADDRESSING
int nvmlDeviceGetAddressingMode(void *gpu, addressing_t *out) { ENTER(INDEX(gpu)); return put(FIELD(gpu, F_ADDR), &out->value); }
#endif

#ifndef NO_V3
int nvmlDeviceGetComputeRunningProcesses_v3(void *gpu, unsigned *count, void *out) {
    (void)out;
    ENTER(INDEX(gpu));
    *count = 0;
    return OK;
}
#endif
