"""What pyproject.toml cannot say: where the cffi builders are, when the wheel may be abi3."""

import sys
import sysconfig

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.extension import Extension

free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


class BuildExt(build_ext):
    """On macOS programs can link a dylib, and not the bundle that an extension usually is."""

    def build_extension(self, ext: Extension) -> None:
        usual = self.compiler.linker_so
        if sys.platform == "darwin" and ext.name == "pccl.capi.libpccl":
            linker = ["-dynamiclib" if word == "-bundle" else word for word in usual]
            self.compiler.linker_so = linker
        try:
            super().build_extension(ext)
        finally:
            self.compiler.linker_so = usual


setup(
    cffi_modules=["pccl/ext/build.py:ffi", "pccl/capi/build.py:ffi"],
    cmdclass={"build_ext": BuildExt},
    options={} if free_threaded else {"bdist_wheel": {"py_limited_api": "cp311"}},
)
