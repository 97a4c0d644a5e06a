//! The library in programs of C and Python: the examples between two processes, and a guest's
//! behaviour. The Python package comes from its wheel.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The library that Cargo has built for this test: it lies beside the test.
fn built() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.with_file_name("libbaton_c.so")
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    text(&output.stdout)
}

/// What users get: library, header, and a virtual environment with the wheel alone.
struct Installed {
    folder: PathBuf,
    python: PathBuf,
}

fn install() -> Installed {
    let (parent, name) =
        (Path::new(env!("CARGO_TARGET_TMPDIR")), format!("library-{}", std::process::id()));
    let folder = parent.join(&name);
    let _ = std::fs::remove_dir_all(&folder);
    let venv = folder.join("venv");
    // The name is relative to the folder of the caller.
    run(Command::new(here().join("build"))
        .current_dir(parent)
        .arg("--from")
        .arg(built())
        .arg(&name));
    run(Command::new("python3").args(["-m", "venv"]).arg(&venv));
    let wheels: Vec<PathBuf> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|kind| kind == "whl"))
        .collect();
    assert_eq!(wheels.len(), 1, "{wheels:?}");
    let python = venv.join("bin/python");
    run(Command::new(&python)
        .args(["-m", "pip", "install", "--quiet", "--no-index"])
        .arg(&wheels[0]));
    Installed { folder, python }
}

impl Drop for Installed {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn compile(installed: &Installed, name: &str, source: &str, library: &[&str]) -> PathBuf {
    let program = installed.folder.join(name);
    let lib = installed.folder.join("lib");
    run(Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1", "-I"])
        .arg(installed.folder.join("include"))
        .arg(here().join(source))
        .arg("-o")
        .arg(&program)
        .arg("-L")
        .arg(&lib)
        .args(library)
        .arg(format!("-Wl,-rpath,{}", lib.display())));
    program
}

/// Runs a source and a destination, each a program and its first arguments.
fn hand_over(source: &mut Command, destination: &mut Command) {
    let mut source = source.arg("source").stdout(Stdio::piped()).spawn().unwrap();
    let mut address = String::new();
    BufReader::new(source.stdout.take().unwrap()).read_line(&mut address).unwrap();
    let printed = run(destination.args(["destination", address.trim()]));
    assert_eq!(printed, "0 wrong values; first token: 42\n");
    assert!(source.wait().unwrap().success());
}

/// One test, because all parts need the wheel in a virtual environment.
#[test]
fn the_library_serves_programs_in_c_and_python() {
    let installed = install();
    check_header(&installed);
    check_destructor(&installed);
    hand_over_between_all_programs(&installed);
    check_guest(&installed);
    run_doctor(&installed);
}

/// The header compiles as C and as C++, and has the values and structures of the Python package.
fn check_header(installed: &Installed) {
    let interface = run(Command::new(&installed.python).arg(here().join("tests/interface.py")));
    for (compiler, standard, name) in [("cc", "-std=c11", "a.c"), ("c++", "-std=c++17", "a.cc")] {
        let source = installed.folder.join(name);
        std::fs::write(&source, &interface).unwrap();
        run(Command::new(compiler)
            .args([standard, "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", "-I"])
            .arg(installed.folder.join("include"))
            .arg(&source));
    }
    // What the header says about the size of a structure is true of that structure.
    let header = std::fs::read_to_string(here().join("include/baton.h")).unwrap();
    let named: Vec<&str> =
        header.split("`sizeof(").skip(1).filter_map(|rest| rest.split(')').next()).collect();
    assert!(named.len() >= 3, "{named:?}");
    for name in named {
        assert!(header.contains(&format!("\n}} {name};")), "{name} is no structure");
    }
}

/// A thread can call the library to its end.
fn check_destructor(installed: &Installed) {
    let program = compile(installed, "destructor", "tests/destructor.c", &["-lbaton", "-pthread"]);
    run(&mut Command::new(program));
}

fn hand_over_between_all_programs(installed: &Installed) {
    let example = "examples/handoff.c";
    let shared = compile(installed, "shared", example, &["-lbaton"]);
    let parts = ["-l:libbaton.a", "-lpthread", "-ldl", "-lm"];
    let whole = compile(installed, "static", example, &parts);
    let in_python = || {
        let mut command = Command::new(&installed.python);
        command.arg(here().join("examples/handoff.py"));
        command
    };
    hand_over(&mut Command::new(&shared), &mut Command::new(&whole));
    hand_over(&mut Command::new(&whole), &mut in_python());
    hand_over(&mut in_python(), &mut Command::new(&shared));
}

fn check_guest(installed: &Installed) {
    let tests = here().join("tests");
    let printed = run(Command::new(&installed.python)
        .arg(tests.join("guest.py"))
        .env("PYTHONPATH", &tests)
        .env("PYTHONDONTWRITEBYTECODE", "1"));
    assert!(printed.ends_with("checks passed\n"), "{printed}");
}

fn run_doctor(installed: &Installed) {
    let printed = run(Command::new(&installed.python).args(["-m", "baton_kv", "doctor"]));
    assert!(printed.contains("shm   works") && printed.contains("tcp   works"), "{printed}");
}
