#!/usr/bin/env bash
# Installs a folder of `pack.sh` into TARGET, without network and without touching the system:
#     FOLDER/bootstrap.sh TARGET && . TARGET/activate
# A folder in PYTHONPATH, since a virtual environment would not see the packages of another one,
# and torch may live in one. PYTHON names the interpreter that has torch.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
[ $# -eq 1 ] || { sed -n '2,3s/^# //p' "$0" >&2; exit 2; }
mkdir -p "$1"
target=$(cd "$1" && pwd)

# Unpacked, which is all that these wheels want: the interpreter may have no pip.
for wheel in "$here"/wheels/*.whl; do
    "$python" -m zipfile --extract "$wheel" "$target"
done
rm -rf "$target/flashinfer_jit_cache"
if [ -f "$here/kernels.tar.gz" ]; then
    tar --extract --file "$here/kernels.tar.gz" --directory "$target" --no-same-owner
fi
cat > "$target/activate" <<END
export PYTHONPATH=$(printf %q "$target")\${PYTHONPATH:+:\$PYTHONPATH}
END
PYTHONPATH=$target "$python" - <<'END'
import importlib.metadata
import importlib.util
import re
import sys

import torch

import prefixcache
from prefixcache import _core

del _core
packages = ("flashinfer", "flashinfer_jit_cache", "triton", "transformers", "pytest")
found = [name for name in packages if importlib.util.find_spec(name)]
print(f"python {sys.version.split()[0]}, torch {torch.__version__}, cuda {torch.version.cuda}")
print(f"prefixcache {prefixcache.__version__} with {', '.join(found)}")
declared = importlib.metadata.requires("prefixcache") or []
needed = {re.match(r"[\w.-]+", one)[0] for one in declared if "extra ==" not in one}
installed = {one.name.replace("_", "-").lower() for one in importlib.metadata.distributions()}
missing = {name for name in needed if name.replace("_", "-").lower() not in installed}
if missing:
    print(f"Neither packed nor there: {', '.join(sorted(missing))}")
END
