#!/bin/sh
# What the images start: `loraplex ARGUMENTS...`, with servers listening on all addresses of the container unless --host says
# otherwise. Who reaches the container is decided by its network and its published ports.
case "${1-}" in
serve | worker | router)
  for argument; do
    case "$argument" in --host | --host=* | --help) exec loraplex "$@" ;; esac
  done
  set -- "$@" --host 0.0.0.0
  ;;
esac
exec loraplex "$@"
