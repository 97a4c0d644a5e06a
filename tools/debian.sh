# Sourced by the scripts that fetch a program from Debian's packages into
# ${XDG_CACHE_HOME:-~/.cache}/baton; nothing is installed. Each script defines how to check for the
# program and how to unpack it. This file has the retry and the lock.

cache=${XDG_CACHE_HOME:-$HOME/.cache}/baton

say() { printf '%s\n' "$*" >&2; }

# Downloads packages into $work.
download() { (cd "$work" && apt-get --quiet --quiet download "$@" >&2); }

# fetch_once WHAT FOLDER IS_THERE FETCH: unless the function IS_THERE succeeds, calls the function
# FETCH, which fills FOLDER and can use the empty folder $work. One process at a time does this.
# Exits with 1 if WHAT is not available.
fetch_once() {
    local what=$1 folder=$2 is_there=$3 fetch=$4 command
    if "$is_there"; then return; fi
    for command in apt-get apt-cache dpkg-deb flock; do
        command -v "$command" >/dev/null && continue
        say "cannot fetch Debian packages: $command is missing"
        exit 1
    done
    mkdir -p "$folder"
    exec 9>"$folder.lock"
    flock 9
    # Another process can have fetched it in the meantime.
    if "$is_there"; then return; fi
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    # apt can run without root's rights, and must be able to read the folder.
    chmod 755 "$work"
    # Lists of packages can be missing or old.
    "$fetch" || { apt-get update >&2 && "$fetch"; } || { say "$what is not available"; exit 1; }
}
