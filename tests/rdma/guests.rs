//! Runs tests in guests with soft-RoCE: tests that need a device in one guest, tests between two
//! hosts in two guests.

use crate::relay::Relay;
use crate::{far, workers};
use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// False, and said, where tests that cannot be brought to a guest may be skipped.
fn there_are_guests() -> bool {
    let check = Command::new(tool("rdma-packages")).arg("--check").stdout(Stdio::null()).status();
    let there_are = check.is_ok_and(|status| status.success());
    if !there_are {
        assert!(env::var_os("BATON_REQUIRE_RDMA").is_none(), "the guest's packages are missing");
        eprintln!("SKIPPED: the guest's packages are missing (tools/rdma-packages fetches them)");
    }
    there_are
}

fn tool(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tools").join(name)
}

/// This program in a guest, with what its tests start.
fn guest(options: &[&str], args: &[&str]) -> Command {
    let files = workers::MODELS.into_iter().flat_map(|model| {
        std::fs::read_dir(model).expect("a fixture").map(|entry| entry.expect("a file").path())
    });
    let mut command = Command::new(tool("rdma-guest"));
    command
        .args([
            "--seconds",
            "300",
            "--env",
            "RUST_BACKTRACE=1",
            "--with",
            env!("CARGO_BIN_EXE_baton"),
        ])
        .args(options)
        .args(files.flat_map(|file| [OsString::from("--with"), file.into()]))
        .arg(env::current_exe().expect("a path"))
        .args(args);
    command
}

fn check(output: &Output) {
    let said = String::from_utf8_lossy(&output.stdout);
    eprintln!("{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "in the guest: {}", output.status);
    assert!(
        said.contains("test result: ok. ") && !said.contains(" 0 passed"),
        "nothing ran in the guest"
    );
}

/// Half a minute where nothing else runs.
#[test]
fn all_holds_on_soft_roce_in_a_guest() {
    if there_are_guests() {
        check(
            &guest(&[], &["--ignored", "--test-threads", "1"])
                .output()
                .expect("a script can be run"),
        );
    }
}

/// A minute where nothing else runs.
#[test]
fn all_holds_between_two_guests_over_a_wire_that_loses() {
    if !there_are_guests() {
        return;
    }
    let folder = Folder::new();
    let sockets = [folder.0.join("far"), folder.0.join("near")];
    let relay = Relay::start([&sockets[0], &sockets[1]], 1);
    let [other, leading] = [(1, &sockets[0]), (2, &sockets[1])]
        .map(|(number, socket)| format!("{number}:{}", socket.display()));
    let agent = guest(&["--net", &other], &["--ignored", "--exact", "far::agent", "--nocapture"])
        .spawn()
        .map(Running)
        .expect("a script can be run");
    let leads = format!("{}=1", far::LEADS);
    let output = guest(
        &["--net", &leading, "--env", &leads],
        &["--ignored", "--test-threads", "1", "--nocapture", "between::"],
    )
    .output()
    .expect("a script can be run");
    drop(agent);
    check(&output);
    let [clean, lossy, held, cut] =
        ["clean", "lossy", "held", "cut"].map(|name| relay.counts(name));
    eprintln!("packets of RoCE: clean {clean:?}, lossy {lossy:?}, held {held:?}, cut {cut:?}");
    assert!(clean.sent > 0 && clean.lost + clean.late + clean.cut == 0);
    assert!(held.late > 0, "nothing was held back");
    assert!(lossy.lost > 0 && lossy.late > 0, "nothing was lost or late");
    assert!(cut.cut > 0 && cut.sent > cut.cut, "nothing was under way where the link was cut");
}

/// A script that runs a guest; both end with the value.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // The script ends its guest only after a SIGTERM.
        let told = Command::new("kill").args(["-TERM", &self.0.id().to_string()]).status();
        assert!(told.is_ok_and(|status| status.success()), "kill is there");
        let _ = self.0.wait();
    }
}

/// Sockets are in it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        let path = env::temp_dir().join(format!("baton-wire-{}", std::process::id()));
        std::fs::create_dir(&path).expect("a folder");
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
