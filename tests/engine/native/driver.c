/* Runs the command lists of a file, for a machine that an emulator plays: no Python there.
 *
 *     driver CASES RESULTS
 *
 * A case is a header, relocations and an image: one block of memory that holds the structures and
 * everything that they point to. It is loaded at some address, its pointers are moved there, the
 * commands are run, and the whole image is written out again behind the call's result.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "dn.h"

typedef struct {
    int64_t image, relocations; /* bytes, number */
    int64_t commands, count, step; /* offset, number, offset */
    int64_t threads;
    dn_needs needs;
    char isa[16];
} header;

static int fail(const char *what)
{
    fprintf(stderr, "driver: %s\n", what);
    return 2;
}

int main(int argc, char **argv)
{
    if (argc != 3) return fail("expected CASES RESULTS");
    FILE *cases = fopen(argv[1], "rb"), *results = fopen(argv[2], "wb");
    if (!cases || !results) return fail("cannot open the files");
    header h;
    while (fread(&h, sizeof h, 1, cases) == 1) {
        int64_t (*moves)[2] = malloc((size_t)(h.relocations + 1) * sizeof *moves);
        uint8_t *image = aligned_alloc(4096, (size_t)(h.image + 4095) / 4096 * 4096);
        if (!moves || !image) return fail("no memory");
        if (fread(moves, sizeof *moves, (size_t)h.relocations, cases) != (size_t)h.relocations ||
            fread(image, 1, (size_t)h.image, cases) != (size_t)h.image)
            return fail("a case is cut");
        for (int64_t i = 0; i < h.relocations; i++)
            *(void **)(void *)(image + moves[i][0]) = image + moves[i][1];
        dn_team *team = dn_team_create((int32_t)h.threads, NULL, h.isa);
        if (!team) return fail("no team of that instruction set");
        int64_t result = dn_reserve(team, &h.needs);
        if (!result)
            result = dn_run(team, (const dn_command *)(const void *)(image + h.commands),
                            (int32_t)h.count, (dn_step *)(void *)(image + h.step));
        dn_team_destroy(team);
        if (fwrite(&result, sizeof result, 1, results) != 1 ||
            fwrite(image, 1, (size_t)h.image, results) != (size_t)h.image)
            return fail("cannot write");
        free(image);
        free(moves);
    }
    return fclose(results) ? fail("cannot write") : 0;
}
