"""What pyproject.toml cannot say: where the cffi builder is, when the wheel may be abi3."""

import sysconfig

from setuptools import setup

free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))

setup(
    cffi_modules=["pccl/ext/build.py:ffi"],
    options={} if free_threaded else {"bdist_wheel": {"py_limited_api": "cp311"}},
)
