"""Presents the tensors of a quantized safetensors checkpoint as weights [out, in].

The tensors of a module (`qweight`, `qzeros`, `scales`, …) are together the weight `MODULE.weight`.
Their names tell which modules are quantized.
"""

from pathlib import Path

import numpy as np

from jsparse.models.quantization_config import Scheme
from jsparse.models.quantized_layouts import SUFFIXES
from jsparse.models.quantized_matrix import QuantizedMatrix
from jsparse.models.safetensors_files import PLAIN, SafetensorsFolder
from jsparse.models.weights import Stored
from jsparse.pallas_kernels.weight_blocks import Form

# scales of quantized activations, queries, K and V, which are in their own dtype here
_UNUSED = tuple(
    f".{of}_{kind}"
    for of in ("input", "output", "activation", "q", "k", "v", "kv")
    for kind in ("scale", "zero_point")
)


class QuantizedSafetensors:
    """A checkpoint with a quantization_config; a jsparse.models.weights.TensorStore."""

    def __init__(self, folder: Path, scheme: Scheme):
        """Reads the headers, and tensors with shapes or the order of columns.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged, or tensors do not match the scheme.
        """
        files = SafetensorsFolder(folder, dict.fromkeys((scheme.dtype, "I8", "I32", "I64")))
        self._files, self._scheme, self.path = files, scheme, folder
        suffix = f".{SUFFIXES[scheme.layout].codes}"
        self._matrices = {
            f"{module}.weight": QuantizedMatrix(files, module, scheme)
            for module in (
                name.removesuffix(suffix) for name in files.shapes if name.endswith(suffix)
            )
            if files.dtypes[module + suffix] == scheme.dtype
        }
        taken = {name for matrix in self._matrices.values() for name in matrix.names}
        self.shapes = {name: matrix.shape for name, matrix in self._matrices.items()}
        for name, shape in files.shapes.items():
            if name in taken or name.endswith(_UNUSED):
                continue
            if files.dtypes[name] not in PLAIN or name in self.shapes:
                raise ValueError(
                    f"{folder}: {name} is {files.dtypes[name]}{list(shape)}, which is no part of "
                    "a matrix quantized as config.json states"
                )
            self.shapes[name] = shape

    def nbytes(self, name: str) -> int:
        matrix = self._matrices.get(name)
        return sum(map(self._files.nbytes, [name] if matrix is None else matrix.names))

    def kind(self, name: str) -> str:
        """Returns a quantized matrix's codes, such as "fp8" or "int4", or a tensor's dtype."""
        if name not in self._matrices:
            return self._files.kind(name)
        return f"{'fp' if self._scheme.floats else 'int'}{self._scheme.bits}"

    def read(self, name: str) -> np.ndarray:
        """Reads a quantized matrix as float32, or another tensor in its own dtype."""
        matrix = self._matrices.get(name)
        return self._files.read(name) if matrix is None else matrix.numbers()

    def form(self, name: str) -> Form | None:
        matrix = self._matrices.get(name)
        return None if matrix is None else matrix.form

    def blocks(self, name: str) -> Stored | None:
        matrix = self._matrices.get(name)
        return None if matrix is None else matrix.stored()
