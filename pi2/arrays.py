"""Names of NumPy arrays by the type of their elements, for annotations."""

import numpy as np
import numpy.typing as npt

F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I8 = npt.NDArray[np.int8]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Bits = npt.NDArray[np.bool_]
Scales = npt.NDArray[np.float16 | np.float32 | np.uint8]
"""Scales of packed vectors (`pi2.formats.packing`)."""
Raw = npt.NDArray[np.generic]
