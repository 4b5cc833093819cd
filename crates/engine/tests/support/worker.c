/* What runs in the guest while it is snapshotted and forked.
 *
 * worker count        counts for ever; each number goes to memory, to a file and to standard output, and all
 *                     that was noted before is compared again and again. Ends with 1 when anything differs.
 * worker hold MIB     fills so much memory; for every line of input prints the checksum of it
 * worker dirty MIB    as hold, and changes a page of it between two inputs
 * worker churn DIR    writes, syncs, renames and removes files for ever, checking each
 */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { SLOTS = 512, PAGE = 4096 };

static void broken(const char *what, uint64_t count)
{
	printf("BROKEN %s at %llu: %s\n", what, (unsigned long long)count, strerror(errno));
	fflush(stdout);
	exit(1);
}

static void rest(long micros)
{
	struct timespec time = { 0, micros * 1000 };
	nanosleep(&time, NULL);
}

static int count(void)
{
	char *memory = mmap(NULL, SLOTS * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char name[64];
	snprintf(name, sizeof name, "/counted-%d", (int)getpid());
	int file = open(name, O_RDWR | O_CREAT | O_TRUNC, 0644);
	for (uint64_t now = 1;; now++) {
		uint64_t slot = now % SLOTS, look = now * 7 % SLOTS, old;
		/* The last number that went there. */
		uint64_t due = now >= look ? now - (now - look) % SLOTS : 0;
		if (due == now)
			due = now >= SLOTS ? now - SLOTS : 0;
		if (*(uint64_t *)(memory + look * PAGE + 64) != due)
			broken("memory", now);
		if (due && (pread(file, &old, 8, look * 8) != 8 || old != due))
			broken("file", now);
		for (int i = 0; i < PAGE; i += 64)
			*(uint64_t *)(memory + slot * PAGE + i) = now;
		if (pwrite(file, &now, 8, slot * 8) != 8)
			broken("write", now);
		printf("%llu\n", (unsigned long long)now);
		fflush(stdout);
		rest(1000);
	}
}

static int hold(long mib, int changes)
{
	size_t words = (size_t)mib << 17;
	uint64_t *memory = mmap(NULL, words * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint64_t seed = 88172645463325252ull;
	char line[64];
	if (memory == MAP_FAILED)
		broken("memory", mib);
	for (size_t i = 0; i < words; i++) {
		seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
		memory[i] = seed;
	}
	for (uint64_t round = 0;; round++) {
		uint64_t sum = 0;
		for (size_t i = 0; i < words; i++)
			sum = sum * 31 + memory[i];
		printf("sum %016llx\n", (unsigned long long)sum);
		fflush(stdout);
		if (!fgets(line, sizeof line, stdin))
			return 0;
		if (changes)
			memory[round * 7919 % words] ^= round + 1;
	}
}

static int churn(const char *directory)
{
	static char bytes[65536], again[65536];
	char name[256], other[256];
	for (uint64_t now = 1;; now++) {
		snprintf(name, sizeof name, "%s/%llu.new", directory, (unsigned long long)now);
		snprintf(other, sizeof other, "%s/%llu", directory, (unsigned long long)now % 16);
		memset(bytes, (int)(now % 251), sizeof bytes);
		int file = open(name, O_RDWR | O_CREAT | O_TRUNC, 0644);
		if (file < 0 || write(file, bytes, sizeof bytes) != sizeof bytes)
			broken("write", now);
		if (now % 4 == 0 && fsync(file))
			broken("sync", now);
		if (pread(file, again, sizeof again, 0) != sizeof again || memcmp(bytes, again, sizeof bytes))
			broken("read", now);
		close(file);
		if (rename(name, other))
			broken("rename", now);
		printf("%llu\n", (unsigned long long)now);
		fflush(stdout);
	}
}

int main(int argc, char **argv)
{
	if (argc > 1 && !strcmp(argv[1], "count"))
		return count();
	if (argc > 2 && !strcmp(argv[1], "churn"))
		return churn(argv[2]);
	if (argc > 2 && (!strcmp(argv[1], "hold") || !strcmp(argv[1], "dirty")))
		return hold(atol(argv[2]), argv[1][0] == 'd');
	return 2;
}
