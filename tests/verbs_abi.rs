//! Our bindings of libibverbs must agree with the header. A C compiler reports every size, offset
//! and number. The test needs the header (Debian: libibverbs-dev). Without it, the test is skipped
//! with a message, or fails if `BATON_REQUIRE_RDMA` is set.

use baton::sys::verbs::abi::{HEADS, NUMBERS, STRUCTS};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// A C program that prints what the header says, a line each, in our order.
fn probe() -> String {
    let mut lines = String::new();
    for (index, layout) in STRUCTS.iter().chain(HEADS).enumerate() {
        let name = layout.name;
        if index < STRUCTS.len() {
            let _ = writeln!(lines, "    printf(\"{name} %zu\\n\", sizeof({name}));");
        }
        for (field, _) in layout.fields {
            let _ = writeln!(
                lines,
                "    printf(\"{name}.{field} %zu\\n\", offsetof({name}, {field}));"
            );
        }
    }
    for (name, _) in NUMBERS {
        let _ = writeln!(lines, "    printf(\"{name} %u\\n\", (unsigned)({name}));");
    }
    format!(
        "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\n\
         int main(void) {{\n{lines}    return 0;\n}}\n"
    )
}

/// The same lines from our bindings.
fn ours() -> String {
    let mut lines = String::new();
    for (index, layout) in STRUCTS.iter().chain(HEADS).enumerate() {
        let name = layout.name;
        if index < STRUCTS.len() {
            let _ = writeln!(lines, "{name} {}", layout.size);
        }
        for (field, offset) in layout.fields {
            let _ = writeln!(lines, "{name}.{field} {offset}");
        }
    }
    for (name, value) in NUMBERS {
        let _ = writeln!(lines, "{name} {value}");
    }
    lines
}

/// Where `infiniband/verbs.h` is: on the machine, or where `tools/rdma-packages` puts it.
fn include_dir() -> Option<PathBuf> {
    let home = env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    let cache = env::var_os("XDG_CACHE_HOME").map_or(home.join(".cache"), PathBuf::from);
    [PathBuf::from("/usr/include"), cache.join("baton/rdma/usr/include")]
        .into_iter()
        .find(|dir| dir.join("infiniband/verbs.h").exists())
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
    String::from_utf8(output.stdout).expect("ASCII")
}

#[test]
fn sizes_offsets_and_numbers_are_the_headers() {
    let Some(include) = include_dir() else {
        assert!(env::var_os("BATON_REQUIRE_RDMA").is_none(), "infiniband/verbs.h is missing");
        eprintln!("SKIPPED: infiniband/verbs.h is missing (tools/rdma-packages fetches it)");
        return;
    };
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (source, program) = (dir.join("verbs_abi.c"), dir.join("verbs_abi"));
    fs::write(&source, probe()).expect("a file can be written");
    run(Command::new("cc").arg("-I").arg(include).arg("-o").arg(&program).arg(&source));
    let theirs = run(&mut Command::new(&program));
    assert!(theirs.lines().count() > 200, "{theirs}");
    for (ours, theirs) in ours().lines().zip(theirs.lines()) {
        assert_eq!(ours, theirs);
    }
    assert_eq!(ours().lines().count(), theirs.lines().count());
}
