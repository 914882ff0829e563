"""Fail when the committed stubs do not describe the schema. Needs no compiler and no network."""

import shutil
import subprocess
import sys
from pathlib import Path

from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

from radix_cache_service.pb import prefix_cache_pb2


def plain(file: FileDescriptorProto) -> FileDescriptorProto:
    """Drop what only one of the two writers fills in."""
    file.DiscardUnknownFields()
    for name in ("name", "source_code_info"):
        file.ClearField(name)
    for message in file.message_type:
        drop_json_names(message)
    return file


def drop_json_names(message: DescriptorProto) -> None:
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        drop_json_names(nested)


buf = shutil.which("buf", path=str(Path(sys.executable).parent)) or "buf"
image = subprocess.check_output([buf, "build", "proto", "--exclude-imports", "-o", "-#format=binpb"])
(schema,) = FileDescriptorSet.FromString(image).file
stubs = FileDescriptorProto.FromString(prefix_cache_pb2.DESCRIPTOR.serialized_pb)
if plain(schema) != plain(stubs):
    sys.exit("the stubs in service/radix_cache_service/pb are older than the schema: run `make proto`")
