//! Faults of a cluster, drawn from a seed. They occur one at a time, and the cluster recovers after
//! each.

use super::cluster::{Cluster, KEEPERS, ROUTERS, WORKERS};
use crate::network;
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

/// Delay of a frame in each direction.
const DELAY: Duration = Duration::from_millis(200);

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Harm {
    /// A worker is killed, and restarted at its address.
    Kill,
    /// A worker is stopped by a signal, and continued.
    Pause,
    /// A worker's link is down.
    Unplug,
    /// Packets of a worker to one other host are lost.
    Deafen,
    /// One packet in ten of a worker is lost.
    Lose,
    /// Every frame from and to a worker is delayed.
    Delay,
    /// A router is killed and restarted. If it is a registry, it starts without entries.
    KillRouter,
    /// One member of etcd is killed, and restarted with its data.
    KillKeeper,
    /// One member of etcd is stopped by a signal, and continued.
    PauseKeeper,
    /// The link of one member of etcd is down.
    UnplugKeeper,
    /// All members of etcd are killed, and restarted without data.
    Forget,
}

use Harm::{
    Deafen, Delay, Forget, Kill, KillKeeper, KillRouter, Lose, Pause, PauseKeeper, Unplug,
    UnplugKeeper,
};

const TO_WORKERS: [Harm; 6] = [Kill, Pause, Unplug, Deafen, Lose, Delay];
const TO_ETCD: [Harm; 4] = [KillKeeper, PauseKeeper, UnplugKeeper, Forget];

/// Draws the faults from a seed (SplitMix64).
pub struct Fate {
    state: u64,
    /// The faults that remain before each has been drawn once.
    left: Vec<Harm>,
}

impl Fate {
    pub fn new(seed: u64) -> Fate {
        Fate { state: seed, left: Vec::new() }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % bound as u64) as usize
    }

    fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }

    /// The next fault for this cluster: each possible one once, in random order, then all again.
    fn harm(&mut self, cluster: &Cluster) -> Harm {
        if self.left.is_empty() {
            self.left = [&TO_WORKERS[..], &[KillRouter]].concat();
            if !cluster.etcd.is_empty() {
                self.left.extend(TO_ETCD);
            }
        }
        let which = self.below(self.left.len());
        self.left.swap_remove(which)
    }

    /// Causes one fault, and waits until the cluster has recovered.
    pub fn strike(&mut self, cluster: &mut Cluster) {
        let harm = self.harm(cluster);
        let worker = self.below(WORKERS.len());
        let router = self.below(ROUTERS.len());
        let keeper = self.below(KEEPERS.len());
        let mut time = Duration::from_millis(self.pick(&[200, 1000, 2500, 6000]));
        if harm == Delay {
            // A shorter fault would end between two requests.
            time = time.max(Duration::from_secs(2));
        }
        // A process that restarts takes time by itself.
        let while_dead = time.min(Duration::from_secs(2));
        let host = match harm {
            Forget => "etcd",
            KillRouter => ROUTERS[router],
            KillKeeper | PauseKeeper | UnplugKeeper => KEEPERS[keeper],
            Kill | Pause | Unplug | Deafen | Lose | Delay => WORKERS[worker],
        };
        eprintln!("STORM {harm:?} {host} {time:?}");
        match harm {
            Kill => {
                cluster.workers[worker].kill();
                thread::sleep(while_dead);
                cluster.workers[worker] = cluster.start_worker(worker);
            }
            Pause => {
                cluster.workers[worker].pause();
                thread::sleep(time);
                cluster.workers[worker].go_on();
            }
            Unplug | UnplugKeeper => {
                cluster.network.set_port(host, "down");
                thread::sleep(time);
                cluster.network.set_port(host, "up");
            }
            Deafen | Lose => {
                let others = WORKERS.iter().chain(&ROUTERS).copied().filter(|other| *other != host);
                let other = self.pick(&others.collect::<Vec<_>>());
                let rule = match harm {
                    Deafen => format!("ip daddr {}", network::address(other)),
                    _ => "numgen random mod 10 < 1".to_owned(),
                };
                cluster.network.drop_packets(host, Some(&rule));
                thread::sleep(time);
                cluster.network.drop_packets(host, None);
            }
            Delay => {
                let detour = cluster.network.delay(host, DELAY);
                let begun = Instant::now();
                TcpStream::connect(cluster.workers[worker].address).expect("it listens");
                assert!(begun.elapsed() >= 2 * DELAY, "it is not late");
                thread::sleep(time);
                drop(detour);
            }
            KillRouter => {
                cluster.kill_router(router);
                thread::sleep(while_dead);
                cluster.routers[router] = cluster.start_router(router);
            }
            KillKeeper => {
                cluster.etcd[keeper].kill();
                thread::sleep(time);
                cluster.restart_keeper(keeper);
            }
            PauseKeeper => {
                cluster.etcd[keeper].signal("STOP");
                thread::sleep(time);
                cluster.etcd[keeper].signal("CONT");
            }
            Forget => {
                for server in &mut cluster.etcd {
                    server.kill();
                    server.forget_everything();
                }
                thread::sleep(while_dead);
                (0..KEEPERS.len()).for_each(|keeper| cluster.restart_keeper(keeper));
            }
        }
        cluster.await_whole();
        thread::sleep(Duration::from_millis(500));
    }
}
