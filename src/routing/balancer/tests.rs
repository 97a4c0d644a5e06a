//! Choices among a few workers.

use super::*;
use crate::config::Policy;
use crate::limits::ROUTER_SUSPECT_TIME;
use crate::routing::attempts::AvoidList;
use crate::routing::demand::Demand;
use crate::routing::health::HealthChange;
use crate::routing::load::{LoadReport, WorkerLoad};
use crate::stdx::failpoint::panic_of;
use crate::stdx::rng::mix;

fn router(policy: impl Into<Policies>, prefill: usize, decode: usize) -> LoadBalancer {
    let mut router = LoadBalancer::new(policy);
    for (role, count) in [(Leg::Prefill, prefill), (Leg::Decode, decode)] {
        for _ in 0..count {
            join(&mut router, role);
        }
    }
    router
}

impl LoadBalancer {
    /// Chooses workers for a request that needs a pair.
    fn choose_pair(
        &mut self,
        work: &Demand,
        avoid: &AvoidList,
        now: Instant,
    ) -> Result<ReservedPair, NoWorker> {
        let (prefill, decode) = self.choose_serving(work, avoid, now)?;
        Ok(ReservedPair { prefill: prefill.expect("a pair"), decode })
    }
}

/// A worker that is up.
fn join(router: &mut LoadBalancer, role: Leg) -> WorkerNumber {
    let now = Instant::now();
    let worker = router.join(role, now);
    assert_eq!(router.probed(worker, true, now), Some(HealthChange::Up));
    worker
}

fn numbers(pair: &ReservedPair) -> (usize, usize) {
    (pair.prefill.worker().0, pair.decode.worker().0)
}

fn reserved(router: &LoadBalancer) -> Vec<u32> {
    router.workers().map(|(_, _, load)| load.reserved).collect()
}

#[test]
fn decode_reads_alone_if_no_pair_is_left_or_its_prefill_worker_has_failed() {
    let now = Instant::now();
    let mut router = router(Policy::RoundRobin, 1, 2);
    let [prefill, first, second] = [0, 1, 2].map(WorkerNumber);
    router.set_local_prefill(second, true);
    router.set_local_prefill(prefill, true);
    let serving = |router: &mut LoadBalancer, avoid: &AvoidList| {
        let (prefill, decode) = router.choose_serving(&Demand::of(3), avoid, now)?;
        let chosen = (prefill.as_ref().map(Reservation::worker), decode.worker());
        prefill
            .into_iter()
            .chain([decode])
            .for_each(|reservation| router.release(reservation, Instant::now()));
        Ok::<_, NoWorker>(chosen)
    };
    let none = AvoidList::default();
    assert_eq!(serving(&mut router, &none), Ok((Some(prefill), first)));
    let failed = AvoidList { failed: vec![prefill], ..AvoidList::default() };
    assert_eq!(serving(&mut router, &failed), Ok((None, second)));
    // The prefill worker is reachable and has refused. The client gets its answer.
    let unwilling = AvoidList { unwilling: vec![prefill], ..AvoidList::default() };
    let no = NoWorker::Of { role: Leg::Prefill, may_come: false };
    assert_eq!(serving(&mut router, &unwilling), Err(no));
    // A prefill worker that drains counts as absent.
    let draining = AvoidList { draining: vec![prefill], ..unwilling.clone() };
    assert_eq!(serving(&mut router, &draining), Ok((None, second)));
    assert!(router.is_ready());
    assert_eq!(router.refused(prefill), Some(HealthChange::Down));
    assert_eq!(serving(&mut router, &unwilling), Ok((None, second)));
    assert!(router.is_ready());
    assert_eq!(router.refused(second), Some(HealthChange::Down));
    assert!(!router.is_ready());
    assert_eq!(
        serving(&mut router, &unwilling).map_err(NoWorker::may_come),
        Err(true),
        "it may come back"
    );
    assert_eq!(reserved(&router), [0, 0, 0]);
}

#[test]
fn legs_are_chosen_apart_and_numbered_together() {
    let mut router = router(Policy::RoundRobin, 2, 3);
    let chosen: Vec<_> = (0..4)
        .map(|_| {
            numbers(
                &router.choose_pair(&Demand::of(1), &AvoidList::default(), Instant::now()).unwrap(),
            )
        })
        .collect();
    assert_eq!(chosen, [(0, 2), (1, 3), (0, 4), (1, 2)]);
    assert_eq!(
        (router.role(WorkerNumber(1)), router.role(WorkerNumber(2))),
        (Some(Leg::Prefill), Some(Leg::Decode))
    );
}

#[test]
fn a_burst_spreads_by_the_booked_load_and_a_release_makes_room() {
    let mut router = router(Policy::LeastLoaded, 1, 2);
    let heavy = router.choose_pair(&Demand::of(5), &AvoidList::default(), Instant::now()).unwrap();
    let light: Vec<ReservedPair> = (0..3)
        .map(|_| router.choose_pair(&Demand::of(1), &AvoidList::default(), Instant::now()).unwrap())
        .collect();
    assert!(light.iter().all(|pair| numbers(pair) == (0, 2)));
    router.release(heavy.decode, Instant::now());
    assert_eq!(
        numbers(
            &router.choose_pair(&Demand::of(1), &AvoidList::default(), Instant::now()).unwrap()
        ),
        (0, 1)
    );
    router.release(heavy.prefill, Instant::now());
    for pair in light {
        router.release(pair.prefill, Instant::now());
        router.release(pair.decode, Instant::now());
    }
    assert_eq!(reserved(&router), [1, 1, 0]);
}

#[test]
fn nothing_is_booked_without_a_pair() {
    let mut router = router(Policy::LeastLoaded, 1, 1);
    assert!(router.is_ready());
    assert_eq!(router.refused(WorkerNumber(1)), Some(HealthChange::Down));
    assert!(!router.is_ready());
    assert_eq!(
        router.choose_pair(&Demand::of(1), &AvoidList::default(), Instant::now()),
        Err(NoWorker::Of { role: Leg::Decode, may_come: true })
    );
    assert_eq!(reserved(&router), [0, 0]);
    assert_eq!(router.first(&AvoidList::default()), Ok(WorkerNumber(0)));
    let unwilling = AvoidList { unwilling: vec![WorkerNumber(0)], ..AvoidList::default() };
    assert_eq!(router.first(&unwilling), Err(NoWorker::Of { role: Leg::Prefill, may_come: true }));
    let unwilling =
        AvoidList { unwilling: vec![WorkerNumber(0), WorkerNumber(1)], ..AvoidList::default() };
    assert_eq!(router.first(&unwilling), Err(NoWorker::Of { role: Leg::Prefill, may_come: false }));
    router.refused(WorkerNumber(0));
    assert_eq!(
        router.choose_pair(&Demand::of(1), &AvoidList::default(), Instant::now()),
        Err(NoWorker::Of { role: Leg::Prefill, may_come: true })
    );
    assert_eq!(
        router.first(&AvoidList::default()),
        Err(NoWorker::Of { role: Leg::Prefill, may_come: true })
    );
}

#[test]
fn every_worker_is_probed_once_and_unusable_until_then() {
    let now = Instant::now();
    let mut router = LoadBalancer::new(Policy::RoundRobin);
    assert!(!router.is_ready() && router.begin_probe(now).is_none());
    router.join(Leg::Prefill, now);
    router.join(Leg::Decode, now);
    assert!(!router.is_ready());
    let mut probed = || {
        std::iter::from_fn(|| router.begin_probe(now)).map(|worker| worker.0).collect::<Vec<_>>()
    };
    assert_eq!(probed(), [0, 1]);
    assert_eq!(probed(), [0_usize; 0]);
}

#[test]
fn a_leaving_worker_is_not_chosen_and_is_known_until_its_last_booking_ends() {
    let (mut router, now) = (router(Policy::RoundRobin, 1, 2), Instant::now());
    let running =
        router.choose_pair(&Demand::of(2), &AvoidList::default(), Instant::now()).unwrap();
    assert_eq!(numbers(&running), (0, 1));
    router.leave(WorkerNumber(1));
    assert!(router.knows(WorkerNumber(1)) && !router.has(WorkerNumber(1)));
    assert_eq!(
        router.load(WorkerNumber(1)),
        Some(WorkerLoad { reserved: 2, ..WorkerLoad::default() })
    );
    for _ in 0..3 {
        assert_eq!(
            numbers(
                &router.choose_pair(&Demand::of(1), &AvoidList::default(), Instant::now()).unwrap()
            ),
            (0, 2)
        );
    }
    assert_eq!(router.probed(WorkerNumber(1), true, now), None, "it does not come up again");
    assert_eq!(
        router.choose_one(Leg::Decode, 0, &AvoidList::default(), Instant::now()).unwrap().worker(),
        WorkerNumber(2)
    );
    router.release(running.decode, Instant::now());
    assert!(!router.knows(WorkerNumber(1)));
    let visit = router.reserve_visit(WorkerNumber(0));
    router.leave(WorkerNumber(2));
    router.leave(WorkerNumber(0));
    router.release(visit, Instant::now());
    assert!(router.knows(WorkerNumber(0)), "sequences are reserved on it");
    assert_eq!(
        router.choose_pair(&Demand::of(1), &AvoidList::default(), Instant::now()),
        Err(NoWorker::Of { role: Leg::Prefill, may_come: true })
    );
}

#[test]
fn a_worker_number_is_never_reused_and_round_robin_skips_a_missing_one() {
    let mut router = router(Policy::RoundRobin, 1, 3);
    let chosen = |router: &mut LoadBalancer| {
        numbers(&router.choose_pair(&Demand::of(1), &AvoidList::default(), Instant::now()).unwrap())
            .1
    };
    assert_eq!((chosen(&mut router), chosen(&mut router)), (1, 2));
    router.leave(WorkerNumber(2));
    assert_eq!(join(&mut router, Leg::Decode), WorkerNumber(4));
    assert_eq!(std::array::from_fn(|_| chosen(&mut router)), [3, 4, 1, 3]);
    for number in 1..=4 {
        router.leave(WorkerNumber(number));
    }
    assert_eq!(join(&mut router, Leg::Decode), WorkerNumber(5));
    assert_eq!(chosen(&mut router), 5);
}

#[test]
fn each_role_has_a_policy_of_its_own() {
    let mut router =
        router(Policies { prefill: Policy::RoundRobin, decode: Policy::LeastLoaded }, 2, 2);
    // The reservations of the first of each role stay.
    let first = router.choose_pair(&Demand::of(1), &AvoidList::default(), Instant::now()).unwrap();
    let chosen: Vec<_> = (0..3)
        .map(|_| {
            let pair =
                router.choose_pair(&Demand::of(1), &AvoidList::default(), Instant::now()).unwrap();
            let chosen = numbers(&pair);
            router.release(pair.prefill, Instant::now());
            router.release(pair.decode, Instant::now());
            chosen
        })
        .collect();
    assert_eq!((numbers(&first), &chosen[..]), ((0, 2), &[(1, 3), (0, 3), (1, 3)][..]));
}

#[test]
fn misfits_are_never_paired_and_a_worker_of_unknown_kind_may_fit() {
    let mut router = router(Policy::RoundRobin, 2, 2);
    let [a, b] = [[1; 32], [2; 32]].map(|kind| CompatDigest { by_family: kind, by_class: None });
    router.entered(WorkerNumber(0), a);
    router.entered(WorkerNumber(2), a);
    router.entered(WorkerNumber(3), b);
    for _ in 0..4 {
        let (prefill, decode) = numbers(
            &router.choose_pair(&Demand::of(1), &AvoidList::default(), Instant::now()).unwrap(),
        );
        assert!((prefill, decode) != (0, 3));
    }
    router.entered(WorkerNumber(1), b);
    let mut pairs: Vec<_> = (0..4)
        .map(|_| {
            numbers(
                &router.choose_pair(&Demand::of(1), &AvoidList::default(), Instant::now()).unwrap(),
            )
        })
        .collect();
    pairs.sort_unstable();
    assert_eq!(pairs, [(0, 2), (0, 2), (1, 3), (1, 3)]);
    router.refused(WorkerNumber(2));
    assert_eq!(
        numbers(
            &router.choose_pair(&Demand::of(1), &AvoidList::default(), Instant::now()).unwrap()
        ),
        (1, 3),
        "no other worker fits"
    );
    router.refused(WorkerNumber(1));
    assert_eq!(
        router.choose_pair(&Demand::of(1), &AvoidList::default(), Instant::now()),
        Err(NoWorker::Fitting { may_come: true })
    );
    assert!(!router.is_ready());
}

#[test]
fn a_worker_that_failed_a_request_is_chosen_last_and_one_that_refused_it_never() {
    let mut router = router(Policy::RoundRobin, 1, 3);
    let mut avoid = AvoidList {
        failed: vec![WorkerNumber(0), WorkerNumber(1)],
        unwilling: vec![WorkerNumber(2)],
        ..AvoidList::default()
    };
    for _ in 0..3 {
        assert_eq!(
            numbers(&router.choose_pair(&Demand::of(1), &avoid, Instant::now()).unwrap()),
            (0, 3),
            "there is one prefill worker"
        );
    }
    avoid.unwilling.push(WorkerNumber(3));
    assert_eq!(
        numbers(&router.choose_pair(&Demand::of(1), &avoid, Instant::now()).unwrap()),
        (0, 1)
    );
    router.refused(WorkerNumber(1));
    assert_eq!(
        router.choose_pair(&Demand::of(1), &avoid, Instant::now()),
        Err(NoWorker::Of { role: Leg::Decode, may_come: true })
    );
    avoid.unwilling.push(WorkerNumber(1));
    assert_eq!(
        router.choose_pair(&Demand::of(1), &avoid, Instant::now()),
        Err(NoWorker::Of { role: Leg::Decode, may_come: false })
    );
}

#[test]
fn a_worker_that_fails_at_once_does_not_attract_all_requests() {
    let mut router = router(Policy::LeastLoaded, 1, 2);
    let now = Instant::now();
    let chosen = |router: &mut LoadBalancer, now| {
        let pair = router.choose_pair(&Demand::of(1), &AvoidList::default(), now).unwrap();
        let decode = pair.decode.worker();
        router.release(pair.prefill, Instant::now());
        if decode == WorkerNumber(1) {
            // The request fails there.
            router.release(pair.decode, Instant::now());
            router.record_failure(decode, now);
        }
        decode.0
    };
    let first: Vec<usize> = (0..6).map(|_| chosen(&mut router, now)).collect();
    assert_eq!(first, [1, 2, 2, 2, 2, 2]);
    let later = now + ROUTER_SUSPECT_TIME;
    assert_eq!((chosen(&mut router, later), chosen(&mut router, later)), (1, 2), "tried once more");
    router.record_success(WorkerNumber(1));
    assert_eq!(chosen(&mut router, later), 1);
}

/// A rolling update: two old workers, then one of each kind, then only the new kind.
#[test]
fn those_that_do_not_fit_are_never_paired() {
    let kind =
        |weights: &str| Compatibility::from_report(&serde_json::json!({ "weights": weights }));
    let mut router = router(Policy::RoundRobin, 2, 2);
    let [old, new, other_new, other_old] = [0, 1, 2, 3].map(WorkerNumber);
    for worker in [old, new, other_new, other_old] {
        assert_eq!(router.set_compatibility(worker, kind("old")), None);
    }
    assert_eq!(
        router.set_compatibility(new, kind("new")).map(|(worker, _)| worker),
        Some(other_new)
    );
    let misfit = |router: &LoadBalancer, worker| {
        router.misfit(worker).map(|(other, why)| (other, why.to_string()))
    };
    let why = "weights differs: new and old".to_owned();
    assert_eq!(misfit(&router, new), Some((other_new, why)), "it fits no worker");
    assert_eq!(misfit(&router, old), None);
    let chosen: Vec<_> = (0..4)
        .map(|_| {
            numbers(
                &router.choose_pair(&Demand::of(1), &AvoidList::default(), Instant::now()).unwrap(),
            )
        })
        .collect();
    assert_eq!(chosen, [(0, 2), (0, 3), (0, 2), (0, 3)], "none for the new one yet");
    router.set_compatibility(other_new, kind("new"));
    assert_eq!([new, other_new, old].map(|worker| router.misfit(worker)), [None, None, None]);
    let chosen: Vec<_> = (0..4)
        .map(|_| {
            numbers(
                &router.choose_pair(&Demand::of(1), &AvoidList::default(), Instant::now()).unwrap(),
            )
        })
        .collect();
    assert_eq!(chosen, [(1, 2), (0, 3), (1, 2), (0, 3)]);
    router.refused(other_old);
    assert!(router.is_ready());
    assert_eq!(
        numbers(
            &router.choose_pair(&Demand::of(1), &AvoidList::default(), Instant::now()).unwrap()
        ),
        (1, 2)
    );
    router.refused(new);
    assert!(!router.is_ready());
    assert_eq!(
        router.choose_pair(&Demand::of(1), &AvoidList::default(), Instant::now()),
        Err(NoWorker::Fitting { may_come: true })
    );
}

#[test]
fn kept_kv_goes_to_a_decode_worker_that_fits_and_has_not_failed() {
    let kind =
        |weights: &str| Compatibility::from_report(&serde_json::json!({ "weights": weights }));
    let mut router = router(Policy::RoundRobin, 1, 3);
    let [reader, failed, other, misfit] = [0, 1, 2, 3].map(WorkerNumber);
    let avoid = AvoidList { failed: vec![failed], ..AvoidList::default() };
    let work = Demand::of(1);
    let choose = |router: &mut LoadBalancer| {
        let chosen = router.choose_behind(reader, &work, &avoid, Instant::now());
        chosen.map(|reservation| reservation.worker())
    };
    for (worker, weights) in [(reader, "a"), (failed, "a"), (other, "a"), (misfit, "b")] {
        router.set_compatibility(worker, kind(weights));
    }
    assert_eq!([choose(&mut router), choose(&mut router)], [Ok(other), Ok(other)]);
    assert_eq!(reserved(&router), [0, 0, 2, 0]);
    router.refused(other);
    assert!(choose(&mut router).is_err(), "one has failed, and one does not fit");
    router.leave(reader);
    assert!(choose(&mut router).is_err(), "nothing is kept any more");
}

/// A request that was admitted is not refused because another worker is slower.
#[test]
fn a_request_that_failed_on_a_worker_is_not_refused_as_late() {
    let (now, ms) = (Instant::now(), Duration::from_millis(1));
    let mut router =
        router(Policy::Slo, 1, 2).with_forecast(Forecast { tpot: Some(ms), ..Forecast::default() });
    let none = AvoidList::default();
    assert!(matches!(
        router.choose_serving(&Demand::of(1), &none, now),
        Err(NoWorker::Late { .. })
    ));
    let failed = AvoidList { failed: vec![WorkerNumber(1)], ..AvoidList::default() };
    let (_, decode) = router.choose_serving(&Demand::of(1), &failed, now).unwrap();
    assert_eq!(decode.worker(), WorkerNumber(2));
}

/// A worker that is down can return as another process. A flush affects all workers.
#[test]
fn cached_prompts_are_forgotten_after_a_flush_or_when_the_worker_is_down() {
    let now = Instant::now();
    let mut router = router(Policy::Slo, 1, 1);
    let work =
        Demand { sequences: 1, samples: 1, tokens: 200, block: 100, blocks: Box::new([1, 2]) };
    let cached = |router: &LoadBalancer| {
        router.prefixes[Leg::Prefill as usize].depth(WorkerNumber(0), &work.blocks)
    };
    let serve = |router: &mut LoadBalancer| {
        let pair = router.choose_pair(&work, &AvoidList::default(), now).unwrap();
        [pair.prefill, pair.decode]
            .into_iter()
            .for_each(|reservation| router.release(reservation, now));
    };
    serve(&mut router);
    assert_eq!(cached(&router), 2);
    router.forget_prompts();
    assert_eq!(cached(&router), 0);
    serve(&mut router);
    assert_eq!(router.refused(WorkerNumber(0)), Some(HealthChange::Down));
    assert_eq!(cached(&router), 0);
}

/// A retry looks at each row of a copy; a first attempt uses the rows directly.
#[test]
fn the_short_way_to_a_choice_gives_the_same_result_as_the_long_way() {
    let long_way = AvoidList { failed: vec![WorkerNumber(usize::MAX)], ..AvoidList::default() };
    for policy in [
        Policy::LeastLoaded,
        Policy::RoundRobin,
        Policy::Random,
        Policy::PowerOfTwo,
        Policy::CacheAware,
        Policy::Lmetric,
        Policy::Slo,
    ] {
        let mut routers = [(); 2].map(|()| router(policy, 7, 5).over_caches(40).seeded(5));
        let base = Instant::now();
        let mut open: Vec<[ReservedPair; 2]> = Vec::new();
        for turn in 0..600_u64 {
            let now = base + Duration::from_millis(turn * 3);
            let chat = mix(turn) % 20;
            let blocks: Box<[u64]> = (0..1 + mix(chat) % 9)
                .map(|depth| if depth == 0 { 1 } else { mix(chat << 8 | depth) })
                .collect();
            let work = Demand {
                sequences: 1,
                samples: 1,
                tokens: 512 * blocks.len() as u32,
                block: 512,
                blocks,
            };
            let [short, long] = &mut routers;
            let expected = if policy == Policy::Slo { soonest(short, &work, now) } else { None };
            let pairs = [
                short.choose_pair(&work, &AvoidList::default(), now),
                long.choose_pair(&work, &long_way, now),
            ]
            .map(Result::unwrap);
            assert_eq!(numbers(&pairs[0]), numbers(&pairs[1]), "{policy:?}, turn {turn}");
            assert!(
                expected.is_none_or(|worker| worker == pairs[0].prefill.worker()),
                "{policy:?}, turn {turn}"
            );
            open.push(pairs);
            if open.len() > 9 {
                let at = (mix(turn) % 9) as usize;
                for (router, mut pair) in routers.iter_mut().zip(open.swap_remove(at)) {
                    router.mark_read(&mut pair.prefill, now);
                    [pair.prefill, pair.decode]
                        .into_iter()
                        .for_each(|reservation| router.release(reservation, now));
                }
            }
            for router in &mut routers {
                match turn {
                    200 => router.leave(WorkerNumber(2)),
                    300 => _ = join(router, Leg::Prefill),
                    400 => _ = router.refused(WorkerNumber(4)),
                    500 => router.record_failure(WorkerNumber(0), now),
                    _ => {}
                }
            }
        }
    }
}

/// A plain search: the prefill worker with the shortest queue plus twice the prompt. Among equals,
/// the next after the last choice.
fn soonest(router: &LoadBalancer, work: &Demand, now: Instant) -> Option<WorkerNumber> {
    let prefixes = &router.prefixes[Leg::Prefill as usize];
    let mut usable: Vec<_> =
        router.workers().filter(|(_, role, load)| *role == Leg::Prefill && load.usable).collect();
    if usable.iter().any(|(_, _, load)| load.suspect.is_some_and(|until| now < until)) {
        return None;
    }
    usable
        .sort_by_key(|(number, ..)| (Some(*number) <= router.last[Leg::Prefill as usize], *number));
    let ends = usable.into_iter().map(|(number, _, load)| {
        let missing = work.missing(prefixes.depth(number, &work.blocks));
        let reading = router.forecast.reading_ms(missing, work.tokens - missing);
        (load.queue(now).as_nanos() as f64 * 1e-6 + 2.0 * reading, number)
    });
    let first = ends.reduce(|best, other| if other.0 < best.0 { other } else { best });
    first.map(|(_, number)| number)
}

/// Two routers share the same workers. The second has just started, and knows the first one's load
/// only from reports.
#[test]
fn a_router_sees_the_load_of_another_router_in_worker_reports() {
    let (now, ms) = (Instant::now(), Duration::from_millis);
    for policy in [Policy::LeastLoaded, Policy::Lmetric, Policy::Slo] {
        let [mut first, mut second] = [(); 2].map(|()| router(policy, 2, 2));
        let busy = [0, 2].map(WorkerNumber);
        // For a while the first router has only one usable worker of each role.
        for idle in [1, 3] {
            first.refused(WorkerNumber(idle));
        }
        let work = Demand { sequences: 1, samples: 1, tokens: 2000, ..Demand::default() };
        let none = AvoidList::default();
        let running: Vec<_> =
            (0..6).map(|_| first.choose_pair(&work, &none, now).unwrap()).collect();
        let reports = [0, 1, 2, 3].map(WorkerNumber).map(|worker| {
            let load = first.load(worker).unwrap();
            (
                worker,
                LoadReport {
                    sequences: load.reserved,
                    uncomputed: load.uncomputed,
                    used: load.context,
                },
            )
        });
        let tell = |router: &mut LoadBalancer, now| {
            for (worker, report) in reports {
                router.ask_report(worker);
                router.reported(worker, Some(report), now);
            }
        };
        let chosen = |router: &mut LoadBalancer, now| {
            let pair = router.choose_pair(&work, &none, now).unwrap();
            let workers = [pair.prefill.worker(), pair.decode.worker()];
            [pair.prefill, pair.decode]
                .into_iter()
                .for_each(|reservation| router.release(reservation, now));
            workers
        };
        assert_eq!(chosen(&mut second, now), busy, "{policy:?}: it knows of nothing");
        tell(&mut second, now);
        for turn in 0..4 {
            assert!(
                !chosen(&mut second, now).iter().any(|worker| busy.contains(worker)),
                "{policy:?}, {turn}"
            );
        }
        assert_eq!(reserved(&second), [0; 4], "what others have is reserved nowhere");
        // A worker that reports nothing has no known foreign load.
        for worker in busy {
            second.ask_report(worker);
            second.reported(worker, None, now + ms(1));
            assert_eq!(second.load(worker).unwrap().others, Default::default());
        }
        // The only router counts its own reservations once.
        tell(&mut first, now);
        assert!(first.workers().all(|(_, _, load)| load.others == Default::default()));
        for pair in running {
            [pair.prefill, pair.decode]
                .into_iter()
                .for_each(|reservation| first.release(reservation, now));
        }
    }
}

#[test]
fn invariants_hold_through_reservations_and_find_a_worker_that_leaves_and_can_be_chosen() {
    let now = Instant::now();
    let mut router = router(Policy::CacheAware, 3, 3);
    let mut pairs = Vec::new();
    for tokens in 1..40 {
        pairs.push(router.choose_pair(&Demand::of(tokens), &AvoidList::default(), now).unwrap());
        router.invariants();
    }
    router.leave(WorkerNumber(1));
    router.invariants();
    for pair in pairs {
        [pair.prefill, pair.decode].into_iter().for_each(|one| router.release(one, now));
        router.invariants();
    }
    assert!(!router.knows(WorkerNumber(1)));

    let visit = router.reserve_visit(WorkerNumber(2));
    let message = panic_of("leaving worker stays usable", || {
        router.leave(WorkerNumber(2));
        router.invariants();
    });
    assert!(message.contains("a worker that leaves is not chosen"), "{message}");
    router.release(visit, now);
}

#[test]
fn invariants_find_an_absent_worker_that_is_counted_as_one_that_serves_alone() {
    let leave = || {
        let mut router = router(Policy::RoundRobin, 1, 2);
        router.set_local_prefill(WorkerNumber(2), true);
        router.invariants();
        router.leave(WorkerNumber(2));
        router.invariants();
    };
    leave();
    let message = panic_of("absent worker serves alone", leave);
    assert!(message.contains("workers that serve alone are counted"), "{message}");
}
