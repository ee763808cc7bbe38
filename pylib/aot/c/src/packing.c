#include "packing.h"

#include <string.h>

packing packing_of(const lowbit_matmul *h) {
    json p = json_member(h->weight, "packing");
#define NUMBER(name) .name = json_integer(json_member(p, #name))
    return (packing){NUMBER(bits),
                     NUMBER(chunk),
                     NUMBER(units),
                     NUMBER(row_blocks),
                     NUMBER(chunks),
                     NUMBER(group),
                     NUMBER(padded_group),
                     NUMBER(groups),
                     NUMBER(block_rows)};
}

/* Of a gated weight 8 rows of the gate are stored, and 8 that they multiply. */
int64_t given_row(const lowbit_matmul *h, int64_t r) {
    if (!h->gated) return r;
    int64_t rows = h->n / h->experts, expert = r / rows, local = r % rows;
    return expert * rows + local % 16 / HALF * (rows / 2) + local / 16 * HALF + local % HALF;
}

int64_t stored_row(const lowbit_matmul *h, int64_t r) {
    if (!h->gated) return r;
    int64_t rows = h->n / h->experts, expert = r / rows, local = r % rows, in_half = local % (rows / 2);
    return expert * rows + in_half / HALF * 16 + local / (rows / 2) * HALF + in_half % HALF;
}

int tensor_named(const lowbit_matmul *h, const char *name) {
    for (int i = 0; i < h->tensors; i++)
        if (!strcmp(h->tensor_name[i], name)) return i;
    return -1;
}

int width_of(const char *type) { return type[0] == 'u' || type[0] == 'e' ? 1 : strstr(type, "32") ? 4 : 2; }

/* Whole codes side by side, and then those cut into the spare bits. */
int run_of(int bits, reg *run) {
    int divisor = bits % 8 == 0 ? 8 : bits % 4 == 0 ? 4 : bits % 2 == 0 ? 2 : 1;
    int registers = 16 / divisor, words = bits / divisor, whole = 16 / bits, spare = 16 % bits, n = 0;
    for (int word = 0; word < words; word++)
        for (int i = 0; i < whole; i++) run[n++] = (reg){1, {{word, i * bits, 0, bits}}};
    for (int left = 0; n < registers; left++, n++) {
        run[n].pieces = 0;
        for (int low = 0; low < bits;) {
            int word = (left * bits + low) / spare, within = (left * bits + low) % spare;
            int size = spare - within < bits - low ? spare - within : bits - low;
            run[n].piece[run[n].pieces].word = word, run[n].piece[run[n].pieces].shift = whole * bits + within;
            run[n].piece[run[n].pieces].low = low, run[n].piece[run[n].pieces++].bits = size;
            low += size;
        }
    }
    return registers;
}

/* A place in packed codes: the register of the run, its first word in the lane's words of the chunk, the lane, and which
 * of two neighbours. */
typedef struct {
    int64_t chunk, word;
    const reg *reg;
    int lane, half;
} place;

static place place_of(const packing *p, const reg *run, int64_t row, int64_t column) {
    int64_t registers = 16 * p->units / p->bits, in = column % p->chunk, local = row % ROWS_OF_BLOCK;
    /* a lane's registers: rows g and g + 8 of columns 2 t and 2 t + 1, and the same of columns 8 on */
    int64_t number = in / BLOCK_K * 4 + local / 8 + in % BLOCK_K / 8 * 2;
    return (place){(row / ROWS_OF_BLOCK * p->chunks + column / p->chunk) * p->units * LANES * 16,
                   number / registers * p->units, &run[number % registers], (int)(local % 8 * 4 + in % 8 / 2),
                   (int)(in % 2)};
}

/* Where piece i of a code is: in 16 bits of a word. */
static int64_t bytes_of_piece(const place *at, int i) {
    int64_t word = at->word + at->reg->piece[i].word;
    return at->chunk + (((word / 4 * LANES + at->lane) * 4 + word % 4) * 2 + at->half) * 2;
}

void add_code(const packing *p, const reg *run, unsigned char *codes, int64_t row, int64_t column, uint32_t code) {
    place at = place_of(p, run, row, column);
    for (int i = 0; i < at.reg->pieces; i++) {
        unsigned char *bytes = codes + bytes_of_piece(&at, i);
        uint32_t mask = (1u << at.reg->piece[i].bits) - 1, bits = (code >> at.reg->piece[i].low & mask);
        bits <<= at.reg->piece[i].shift;
        bytes[0] |= (unsigned char)bits, bytes[1] |= (unsigned char)(bits >> 8);
    }
}

uint32_t code_at(const packing *p, const reg *run, const unsigned char *codes, int64_t row, int64_t column) {
    place at = place_of(p, run, row, column);
    uint32_t code = 0;
    for (int i = 0; i < at.reg->pieces; i++) {
        const unsigned char *bytes = codes + bytes_of_piece(&at, i);
        uint32_t mask = (1u << at.reg->piece[i].bits) - 1;
        code |= ((bytes[0] | (uint32_t)bytes[1] << 8) >> at.reg->piece[i].shift & mask) << at.reg->piece[i].low;
    }
    return code;
}
