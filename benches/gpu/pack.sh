#!/usr/bin/env bash
# Packs what `run.py` needs into one folder, for a machine with a GPU and no network:
#     benches/gpu/pack.sh FOLDER [--wheel OURS.whl] [--kernels KERNELS.tar.xz]
# KERNELS holds aot/<uri>/<uri>.so of the FlashInfer release in requirements-alone.in: a record's
# kernels.tar.xz, or FlashInfer's own ahead-of-time build.
# PYTHON (3.10 or newer, with maturin), FOR_PYTHON, FOR_GLIBC and LIMIT_MIB are taken from the
# environment.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
for_python=${FOR_PYTHON:-3.12}
for_glibc=${FOR_GLIBC:-2.39}
limit_mib=${LIMIT_MIB:-52}

usage() { sed -n '2,7s/^# //p' "$0" >&2; exit 2; }

[ $# -ge 1 ] || usage
folder=$1; shift
wheel='' kernels=''
while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || usage
    case $1 in
        --wheel) wheel=$2 ;;
        --kernels) kernels=$2 ;;
        *) usage ;;
    esac
    shift 2
done
[ ! -e "$folder" ] || { echo "$folder exists already: name a new folder." >&2; exit 1; }
mkdir -p "$folder/wheels"

# pip takes a wheel for one of these tags alone, not for an older one.
platforms=(--platform manylinux2014_x86_64)
for minor in $(seq "${for_glibc#2.}" -1 17); do
    platforms+=(--platform "manylinux_2_${minor}_x86_64")
done

download() {
    "$python" -m pip download --quiet --disable-pip-version-check --only-binary=:all: \
        --python-version "$for_python" --implementation cp --abi "cp${for_python/./}" \
        --abi abi3 --abi none "${platforms[@]}" --dest "$folder/wheels" "$@"
}

download --constraint "$root/requirements/dev.txt" --requirement "$here/requirements.in"
download --no-deps --requirement "$here/requirements-alone.in"
if [ -n "$wheel" ]; then
    cp "$wheel" "$folder/wheels/"
else
    PATH=$(dirname "$python"):$PATH "$python" -m pip wheel --quiet --no-deps --no-build-isolation \
        --wheel-dir "$folder/wheels" "$root"
fi

(cd "$root" && git ls-files -z --cached --others --exclude-standard benches/gpu tests/gpu \
    tests/reference tests/support tests/fakes ':(glob)tests/*.py' pyproject.toml | xargs -0 tar --create) | tar --extract --directory "$folder"
if [ -n "$kernels" ]; then
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    package=$scratch/flashinfer_jit_cache
    cp -r "$here/prebuilt/flashinfer_jit_cache" "$package"
    rm -rf "$package/__pycache__"
    tar --extract --file "$kernels" --directory "$package" --no-same-owner
    [ -n "$(find "$package/aot" -mindepth 2 -name '*.so')" ] ||
        { echo "$kernels holds no aot/<uri>/<uri>.so" >&2; exit 1; }
    sed -n 's/^flashinfer-python==//p' "$here/requirements-alone.in" > "$package/version.txt"
    tar --create --gzip --file "$folder/kernels.tar.gz" --directory "$scratch" flashinfer_jit_cache
fi
cp "$here/bootstrap.sh" "$folder/"

mib=$(du -sm --apparent-size "$folder" | cut -f1)
echo "$folder: $mib MiB"
[ "$mib" -le "$limit_mib" ] || { echo "More than $limit_mib MiB: too much to carry." >&2; exit 1; }
