/* How a packed weight lies in memory: codes in the order of tensor-core fragments (lowbit's
 * dialect/formats/packing.py), and rows of gated weights in halves of row blocks (dialect/epilogue.py). */
#ifndef LOWBIT_PACKING_H
#define LOWBIT_PACKING_H

#include "internal.h"

enum { ROWS_OF_BLOCK = 16, BLOCK_K = 16, HALF = 8, LANES = 32, MOST_RUN = 16, MOST_PIECES = 8 };

typedef struct {
    int64_t bits, chunk, units, row_blocks, chunks, group, padded_group, groups, block_rows;
} packing;

/* Where the bits of a register of a lane are, in the words of its run. */
typedef struct {
    int pieces;
    struct {
        int word, shift, low, bits;
    } piece[MOST_PIECES];
} reg;

packing packing_of(const lowbit_matmul *h);
int run_of(int bits, reg *run); /* fills in all registers of a run; how many there are */

/* The row of a weight that is stored as row r. */
int64_t given_row(const lowbit_matmul *h, int64_t r);

/* Codes as they are stored, at a stored row and a column of padded groups. */
void add_code(const packing *p, const reg *run, unsigned char *codes, int64_t row, int64_t column, uint32_t code);
uint32_t code_at(const packing *p, const reg *run, const unsigned char *codes, int64_t row, int64_t column);

int tensor_named(const lowbit_matmul *h, const char *name); /* -1 where there is none */
int width_of(const char *type);                             /* bytes of a number */

#endif
