"""Fail when the committed stubs do not describe the schema. Needs no compiler and no network."""

import shutil
import subprocess
import sys
from pathlib import Path

from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

from radix_cache_service.pb import prefix_cache_pb2, router_pb2


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
schemas = {Path(file.name).stem: file for file in FileDescriptorSet.FromString(image).file}
stubs = {Path(each.DESCRIPTOR.name).stem: each.DESCRIPTOR for each in (prefix_cache_pb2, router_pb2)}
if schemas.keys() != stubs.keys():
    sys.exit(f"the schema has {sorted(schemas)}, and service/radix_cache_service/pb has stubs of {sorted(stubs)}")
for name, schema in schemas.items():
    if plain(schema) != plain(FileDescriptorProto.FromString(stubs[name].serialized_pb)):
        sys.exit(f"the stubs of {name}.proto in service/radix_cache_service/pb are older than it: run `make proto`")
