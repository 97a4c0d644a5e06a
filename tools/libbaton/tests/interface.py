"""Prints a program of C that compiles if the header agrees with the Python package."""

import ctypes

from baton_kv import Element, ErrorCode, EventKind, LogLevel, Role, _library

STRUCTURES = {
    "baton_layout": _library.Layout,
    "baton_config": _library.Config,
    "baton_event": _library.RawEvent,
    "baton_counter_values": _library.RawCounters,
}
ENUMS = {
    "ERROR": ErrorCode, "ROLE": Role, "EVENT_KIND": EventKind, "LOG_LEVEL": LogLevel,
    "ELEMENT": Element,
}


def equal(expression, value):
    print(f'BATON_ASSERT({expression} == {value}, "{expression} is {value} in Python");')


print("""#include "baton.h"
#ifdef __cplusplus
#define BATON_ASSERT(is_true, text) static_assert(is_true, text)
#else
#define BATON_ASSERT(is_true, text) _Static_assert(is_true, text)
#endif""")
for name in ("ABI", "PAYLOAD_BYTES", "KIND_BYTES"):
    equal(f"BATON_{name}", getattr(_library, name))
for name, values in ENUMS.items():
    for value in values:
        equal(f"(int)BATON_{name}_{value.name}", int(value))
for name, structure in STRUCTURES.items():
    equal(f"sizeof({name})", ctypes.sizeof(structure))
    for field, _ in structure._fields_:
        place = getattr(structure, field)
        equal(f"offsetof({name}, {field})", place.offset)
        equal(f"sizeof((({name} *)0)->{field})", place.size)
