#include "json.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

static json blanks(json at) {
    while (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r') at++;
    return at;
}

static json string_end(json at) {
    for (at++; *at && *at != '"'; at++)
        if (*at == '\\' && at[1]) at++;
    return *at ? at + 1 : at;
}

/* Where a string, or a run of letters and digits, ends; any other sign is one by itself. */
static json token_end(json at) {
    if (*at == '"') return string_end(at);
    json end = at;
    while (isalnum((unsigned char)*end) || *end == '-' || *end == '+' || *end == '.') end++;
    return end == at && *at ? at + 1 : end;
}

json json_end(json at) {
    int depth = 0;
    do {
        at = blanks(at);
        depth += (*at == '{' || *at == '[') - (*at == '}' || *at == ']');
        at = token_end(at);
    } while (depth > 0 && *at);
    return at;
}

json json_member(json object, const char *name) {
    if (!object || *object != '{') return NULL;
    size_t length = strlen(name);
    for (json at = blanks(object + 1); *at == '"'; at = blanks(at + 1)) {
        json key = at + 1, end = string_end(at), colon = blanks(end);
        if (*colon != ':') return NULL;
        json value = blanks(colon + 1);
        if ((size_t)(end - 1 - key) == length && !memcmp(key, name, length)) return value;
        at = blanks(json_end(value));
        if (*at != ',') return NULL;
    }
    return NULL;
}

json json_first(json list) {
    if (!list || *list != '[') return NULL;
    json at = blanks(list + 1);
    return *at && *at != ']' ? at : NULL;
}

json json_next(json value) {
    if (!value) return NULL;
    json at = blanks(json_end(value));
    return *at == ',' ? blanks(at + 1) : NULL;
}

int64_t json_integer(json value) { return value ? strtoll(value, NULL, 10) : 0; }

bool json_true(json value) { return value && *value == 't'; }

size_t json_text(json value, char *text, size_t size) {
    size_t length = 0;
    if (size) *text = 0;
    if (!value || *value != '"') return 0;
    for (json at = value + 1; *at && *at != '"'; at++) {
        if (*at == '\\' && at[1]) at++; /* quotes and backslashes: what `lowbit export` writes has no others */
        if (length + 1 < size) text[length] = *at, text[length + 1] = 0;
        length++;
    }
    return length;
}

bool json_is(json value, const char *text) {
    size_t length = strlen(text);
    return value && *value == '"' && !strncmp(value + 1, text, length) && value[1 + length] == '"';
}

bool json_same(json a, json b) {
    if (!a || !b) return a == b;
    json ends = json_end(a), other_ends = json_end(b);
    while (a < ends && b < other_ends) {
        a = blanks(a), b = blanks(b);
        json end = token_end(a), other = token_end(b);
        if (end - a != other - b || memcmp(a, b, (size_t)(end - a))) return false;
        a = end, b = other;
    }
    return a >= ends && b >= other_ends;
}
