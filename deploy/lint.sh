#!/usr/bin/env bash
# What promtool, nginx and systemd-analyze say of their files; a tool that is not installed is passed over.
set -euo pipefail
cd "$(dirname "$0")"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

have() { command -v "$1" >/dev/null || { echo "$1 is not installed: passed over"; return 1; }; }

if have promtool; then
  (cd prometheus && promtool check config prometheus.yaml && promtool test rules alerts_test.yaml)
fi

if PATH=$PATH:/usr/sbin have nginx && have openssl; then
  openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=llm.example.com \
    -keyout "$scratch/llm.key" -out "$scratch/llm.crt" 2>/dev/null
  sed "s#/etc/nginx/tls#$scratch#" nginx/prefixcache.conf >"$scratch/site.conf"
  echo "pid $scratch/pid; error_log stderr; events {} http { access_log off; include $scratch/site.conf; }" \
    >"$scratch/nginx.conf"
  PATH=$PATH:/usr/sbin nginx -t -c "$scratch/nginx.conf"
fi

if have systemd-analyze; then
  # `verify` wants the command to exist.
  sed 's#^ExecStart=[^ ]*#ExecStart=/bin/true#' systemd/prefixcache.service >"$scratch/prefixcache.service"
  systemd-analyze verify "$scratch/prefixcache.service"
fi
