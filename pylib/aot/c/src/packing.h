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

/* A tensor that `pack` takes, what is given for it, and the tensor in memory. */
typedef struct {
    char name[MOST_NAME], type[8];
    int64_t rows, columns, low, high, bit;
    bool integer;
    const lowbit_given *given;
    unsigned char *memory;
} tensor_slot;

tensor_slot slot_of(json about, const lowbit_given *given, int count);
int check_given(const tensor_slot *s); /* fails where it is not given, or has another type or size */
const lowbit_given *given_named(const char *name, const lowbit_given *given, int count); /* NULL where there is none */
int64_t integer_at(const lowbit_given *g, int64_t i);

/* What `pack` takes for a weight whose scaled values are rounded to f8e4m3, with scales of rows (fold.c). */
enum { MOST_GIVEN = 24 };
typedef struct {
    lowbit_given given[MOST_GIVEN];
    float *memory[MOST_GIVEN]; /* of numbers that have changed */
    int count;
} folded;

int fold_scales(const lowbit_matmul *h, const lowbit_given *given, int count, folded *f);
void drop_folded(folded *f);

int tensor_named(const lowbit_matmul *h, const char *name); /* -1 where there is none */
int width_of(const char *type);                             /* bytes of a number */

#endif
