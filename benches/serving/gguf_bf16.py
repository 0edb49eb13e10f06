"""Writes a BF16 copy of a GGUF file: matrices in bfloat16, vectors as they are.

gguf_bf16.py SOURCE.gguf TARGET.gguf

`convert` can keep matrices in float32 too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import numpy as np
from gguf import (
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
    dequantize,
    quantize,
)

_REWRITTEN = {"general.architecture", "general.file_type", "general.quantization_version"}


def convert(source: Path, target: Path, dtype: Literal["BF16", "F32"] = "BF16") -> None:
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    file_type = {"BF16": LlamaFileType.MOSTLY_BF16, "F32": LlamaFileType.ALL_F32}[dtype]
    writer.add_file_type(file_type)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in _REWRITTEN:
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            packed = quantize(values, GGMLQuantizationType[dtype])
            writer.add_tensor(tensor.name, packed, raw_dtype=GGMLQuantizationType[dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
