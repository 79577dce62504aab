"""Protobuf messages of any shape, made from their descriptors."""

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from tests.fuzz.strategies import Strategy, text


def proto(make: type[Message], depth: int = 4) -> Strategy:
    """Messages of one type, any field set to anything that the wire can carry."""
    descriptor: Any = make.DESCRIPTOR
    fields = [field for field in descriptor.fields if depth or field.message_type is None]

    def built(chosen: Mapping[str, Any]) -> Message:
        message = make()
        for name, wire in chosen.items():
            _set(message, descriptor.fields_by_name[name], wire)
        return message

    options = {field.name: _of_field(field, depth) for field in fields}
    return st.fixed_dictionaries({}, optional=options).map(built)


def _of_field(field: FieldDescriptor, depth: int) -> Strategy:
    inner = field.message_type
    if inner is None:
        one = _SCALARS.get(field.cpp_type, text)
    elif inner.GetOptions().map_entry:
        key, value = inner.fields
        return st.dictionaries(_of_field(key, 0), _of_field(value, 0), max_size=3)
    else:
        one = proto(GetMessageClass(inner), depth - 1)
    return st.lists(one, max_size=3) if field.is_repeated else one


_SCALARS: Mapping[int, Strategy] = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 20),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1) | st.integers(0, 20),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 20),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(-1, 99),
    FieldDescriptor.CPPTYPE_STRING: st.sampled_from(["stub-model", "{}", "[", "{" * 300, '{"a": NaN}'])
    | text,
}


def _set(message: Message, field: FieldDescriptor, value: Any) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        getattr(message, field.name).update(value)
    elif field.is_repeated:
        getattr(message, field.name).extend(value)
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(value)
    else:
        setattr(message, field.name, value)
