# Sourced by the scripts that fetch a program from Debian's packages into ${XDG_CACHE_HOME:-~/.cache}/baton; nothing is
# installed. They say what is there already and how it is unpacked; how often it is tried, and by whom, is here.

cache=${XDG_CACHE_HOME:-$HOME/.cache}/baton

say() { printf '%s\n' "$*" >&2; }

# Downloads packages into $work.
download() { (cd "$work" && apt-get --quiet --quiet download "$@" >&2); }

# fetch_once WHAT FOLDER IS_THERE FETCH: has the function FETCH fill FOLDER, with an empty $work to work in, unless
# IS_THERE succeeds; one process at a time. Exits where it cannot be had.
fetch_once() {
    local what=$1 folder=$2 is_there=$3 fetch=$4 command
    if "$is_there"; then return; fi
    for command in apt-get apt-cache dpkg-deb flock; do
        command -v "$command" >/dev/null || { say "no Debian packages here: $command is missing"; exit 1; }
    done
    mkdir -p "$folder"
    exec 9>"$folder.lock"
    flock 9
    # Somebody else may have fetched it meanwhile.
    if "$is_there"; then return; fi
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    # apt may read only what it may, where it drops its rights.
    chmod 755 "$work"
    # Lists of packages may be missing or old.
    "$fetch" || { apt-get update >&2 && "$fetch"; } || { say "$what cannot be had"; exit 1; }
}
