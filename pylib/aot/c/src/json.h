/* Reads JSON where it lies: a value is the place where it begins, NULL where it is missing. Nothing is allocated. */
#ifndef LOWBIT_JSON_H
#define LOWBIT_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef const char *json;

json json_member(json object, const char *name);
json json_first(json list);       /* of a list or of an object's values; NULL where there is none */
json json_next(json value);       /* the value behind one of a list */
json json_end(json value);        /* where a value ends */
int64_t json_integer(json value); /* 0 where it is none */
bool json_true(json value);
bool json_is(json value, const char *text);            /* whether a string is this text */
size_t json_text(json value, char *text, size_t size); /* copies a string, cut to size - 1; its length */
bool json_same(json a, json b);                        /* whether two values are written alike, blanks aside */

#endif
