/* Run one kernel on arguments and memory from standard input; write its status and the memory to standard output.
   `emulation.py` writes the input: numbers of 8 bytes in the order of Header, the pointers, the sizes of the pieces of
   memory, the arguments, the pieces. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define EACH_KERNEL(X) X(planar) X(block) X(basis) X(skew_exp) X(skew_eig)

#define DECLARE(name) int64_t torchrope_##name(const void *arguments, int64_t backward);
#define LIST(name) torchrope_##name,
EACH_KERNEL(DECLARE)
static int64_t (*const kernels[])(const void *, int64_t) = {EACH_KERNEL(LIST)};

typedef struct {
    int64_t kernel, backward, size, pointers, pieces;
} Header;

/* The arguments hold, at `offset`, the address of byte `at` of a piece of memory. */
typedef struct {
    int64_t offset, piece, at;
} Pointer;

static void *get(int64_t bytes) {
    void *memory = NULL;
    if (posix_memalign(&memory, 64, bytes > 0 ? bytes : 64) || fread(memory, 1, bytes, stdin) != (size_t)bytes) exit(2);
    return memory;
}

int main(void) {
    Header *header = get(sizeof *header);
    Pointer *pointers = get(header->pointers * sizeof *pointers);
    int64_t *bytes = get(header->pieces * sizeof *bytes);
    char *arguments = get(header->size), **pieces = malloc(header->pieces * sizeof *pieces + 1);
    for (int64_t i = 0; i < header->pieces; i++) pieces[i] = get(bytes[i]);
    for (int64_t i = 0; i < header->pointers; i++)
        *(void **)(arguments + pointers[i].offset) = pieces[pointers[i].piece] + pointers[i].at;
    int64_t status = kernels[header->kernel](arguments, header->backward);
    fwrite(&status, sizeof status, 1, stdout);
    for (int64_t i = 0; i < header->pieces; i++) fwrite(pieces[i], 1, bytes[i], stdout);
    return 0;
}
