//! Workers with a changed role in the router's list. They get new IDs, and the old IDs still
//! resolve.

use crate::fleet::Fleet;
use crate::members::{await_workers, listed, router};
use crate::process::{PATIENCE, Process};
use crate::{prefill, start};
use serde_json::{Value, json};
use std::thread;
use std::time::{Duration, Instant};

/// The router lists another worker with another ID. The old ID finds it at any time.
fn old_id_leads(router: &Process, worker: &Process) {
    let url = format!("http://{}", worker.address);
    let of = |id: &str, more: &str| {
        let (status, text) = router.get(&format!("/workers/{id}{more}"));
        let told: Value = serde_json::from_str(&text).unwrap();
        (status, told)
    };
    let id = || listed(router).into_iter().find(|(_, at, ..)| *at == url).map(|(_, _, id, _)| id);
    let first = id().expect("it is listed");
    for to in ["prefill", "mixed", "decode"] {
        let (status, said) =
            router.post(&format!("/workers/{first}/role"), &json!({ "role": to }).to_string());
        assert_eq!(status, 202, "{said}");
        let begun = Instant::now();
        loop {
            let (status, told) = of(&first, "/role");
            assert_ne!(status, 404, "{told}");
            if status == 200 && told["role"] == to && told["status"] == "serving" {
                break;
            }
            assert!(begun.elapsed() < PATIENCE, "{to}: {status} {told}");
            thread::sleep(Duration::from_millis(5));
        }
        let begun = Instant::now();
        loop {
            let (status, told) = of(&first, "");
            assert_ne!(status, 404, "{told}");
            if status == 200 && told["is_healthy"] == true && told["worker_type"] == to {
                assert_eq!(
                    (told["url"].as_str(), told["id"].as_str()),
                    (Some(&url[..]), id().as_deref())
                );
                break;
            }
            assert!(begun.elapsed() < PATIENCE, "{to}: {status} {told}");
            thread::sleep(Duration::from_millis(5));
        }
    }
    assert_ne!(id(), Some(first), "it is another one");
    assert_eq!(of("4711", "").0, 404, "no worker ever had that ID");
}

#[test]
fn the_old_id_of_a_named_worker_leads_to_its_successor() {
    let flags = ["--bootstrap-port", "0"];
    let writers = vec![start("decode", &flags), start("decode", &flags)];
    let fleet = Fleet::new(vec![prefill(&[])], writers);
    old_id_leads(&fleet.router, &fleet.decode[1]);
}

#[test]
fn the_old_id_of_a_worker_that_enters_itself_leads_to_its_successor() {
    let router = router(0, &[]);
    let registry = format!("http://{}", router.address);
    let flags = ["--bootstrap-port", "0", "--registry", &registry];
    let _reader = start("prefill", &flags);
    let writers = [(); 2].map(|()| start("decode", &flags));
    await_workers(&router, 3);
    old_id_leads(&router, &writers[1]);
}
