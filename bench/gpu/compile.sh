#!/usr/bin/env bash
# Our C passes as they are when installed, compiled beside their sources; without a compiler their NumPy twins serve.
# Usage: compile.sh SOURCE... (without .c)
set -u
for source in "$@"; do
    cc -O2 -shared -fPIC -I"$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')" "$source.c" \
        -o "$source$(python3 -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')" 2>/dev/null ||
        echo "not compiled, its NumPy twin serves: $source"
done
