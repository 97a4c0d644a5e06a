//! Queues in front of the tokeniser threads. A long prompt takes milliseconds, and the longest body
//! takes seconds. On `ctl`, that would stall all streams and links; on a single thread, it would
//! delay short prompts.
//!
//! Threads: `tok` takes short texts, `tok-long` the others, `grammar` requests with a grammar;
//! `ctl` submits. A full queue refuses a job. Invariants: a cancelled job does not start, and a
//! running one stops between two texts; a panic ends only the request of its text.

use super::{TextJob, TextOutput, TextProcessor, TextResult, TextTask};
use crate::api::ApiError;
use crate::cause::Cause;
use crate::limits::{GRAMMAR_STACK, TOKENISE_SHORT};
use crate::stdx::event_count::EventCount;
use crossbeam_channel::{Receiver, Sender, TrySendError};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};

/// Stack of a thread that tokenises: the usual one of the standard library.
const TEXT_STACK: usize = 2 << 20;

/// Keeps a job wanted: a client waits for the job while this guard exists.
#[derive(Debug)]
pub struct JobGuard(#[expect(dead_code, reason = "its count is what is read")] Arc<()>);

/// The end of the queues that `ctl` uses.
#[derive(Debug)]
pub struct TextQueue {
    short: Sender<QueuedJob>,
    long: Sender<QueuedJob>,
    grammar: Sender<QueuedJob>,
    done: Receiver<TextResult>,
}

#[derive(Debug)]
struct QueuedJob {
    job: TextJob,
    waits: Weak<()>,
}

type Work = dyn Fn(TextTask, &dyn Fn() -> bool) -> Result<TextOutput, ApiError> + Send + Sync;

impl TextQueue {
    /// Starts the threads. Each queue holds at most `capacity` jobs. Each answer notifies `ctl`.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn start(
        text: Arc<TextProcessor>,
        capacity: usize,
        ctl: Arc<EventCount>,
    ) -> io::Result<TextQueue> {
        TextQueue::over(Arc::new(move |task, is_wanted| text.work(task, is_wanted)), capacity, ctl)
    }

    fn over(work: Arc<Work>, capacity: usize, ctl: Arc<EventCount>) -> io::Result<TextQueue> {
        let (queue, workers) = TextQueue::build(work, capacity, ctl);
        let threads = [("tok", TEXT_STACK), ("tok-long", TEXT_STACK), ("grammar", GRAMMAR_STACK)];
        for ((name, stack), worker) in threads.into_iter().zip(workers) {
            let builder = std::thread::Builder::new().name(name.into()).stack_size(stack);
            builder.spawn(move || worker.run())?;
        }
        Ok(queue)
    }

    /// The queues without threads: the caller steps the workers, for short texts, for the others,
    /// and for grammars.
    pub fn stepped(
        text: Arc<TextProcessor>,
        capacity: usize,
        ctl: Arc<EventCount>,
    ) -> (TextQueue, [TextWorker; 3]) {
        TextQueue::build(Arc::new(move |task, is_wanted| text.work(task, is_wanted)), capacity, ctl)
    }

    fn build(
        work: Arc<Work>,
        capacity: usize,
        ctl: Arc<EventCount>,
    ) -> (TextQueue, [TextWorker; 3]) {
        let (answers, done) = crossbeam_channel::bounded(3 * capacity);
        let lane = || {
            let (jobs, queue) = crossbeam_channel::bounded(capacity);
            let (work, answers, ctl) = (work.clone(), answers.clone(), ctl.clone());
            (jobs, TextWorker { queue, work, answers, ctl })
        };
        let [(short, first), (long, second), (grammar, third)] = [lane(), lane(), lane()];
        (TextQueue { short, long, grammar, done }, [first, second, third])
    }

    /// Queues a job. Dropping the guard cancels it.
    ///
    /// # Errors
    /// The queue is full, or its thread has stopped.
    pub fn submit(&self, job: TextJob) -> Result<JobGuard, ApiError> {
        let ticket = Arc::new(());
        let lane = match job.task.has_grammar() {
            true => &self.grammar,
            false if job.task.size() <= TOKENISE_SHORT => &self.short,
            false => &self.long,
        };
        lane.try_send(QueuedJob { job, waits: Arc::downgrade(&ticket) }).map_err(|error| {
            match error {
                TrySendError::Full(_) => {
                    let most = lane.capacity().unwrap_or(0);
                    ApiError::busy(format!(
                        "{most} requests already wait for the tokeniser, which is the limit; try \
                         again later"
                    ))
                }
                TrySendError::Disconnected(_) => {
                    ApiError::from_cause(Cause::Internal, "the tokeniser has stopped")
                }
            }
        })?;
        Ok(JobGuard(ticket))
    }

    /// Whether an answer waits.
    pub fn has_events(&self) -> bool {
        !self.done.is_empty()
    }

    /// The next answer.
    pub fn poll(&self) -> Option<TextResult> {
        self.done.try_recv().ok()
    }
}

/// The end of one queue that does the jobs.
pub struct TextWorker {
    queue: Receiver<QueuedJob>,
    work: Arc<Work>,
    answers: Sender<TextResult>,
    ctl: Arc<EventCount>,
}

impl TextWorker {
    /// Does jobs until the queue closes.
    fn run(self) {
        let _ = self.queue.iter().try_for_each(|queued| self.answer(queued));
    }

    /// Does the next job. Returns whether there was one.
    pub fn step(&self) -> bool {
        let Ok(queued) = self.queue.try_recv() else { return false };
        self.answer(queued).is_ok()
    }

    /// Runs a job if it is still wanted, and sends its result. An error means that the receiver no
    /// longer exists.
    fn answer(&self, QueuedJob { job, waits }: QueuedJob) -> Result<(), ()> {
        let is_wanted = || waits.strong_count() > 0;
        if !is_wanted() {
            return Ok(());
        }
        // A job changes no shared state, so a panic leaves no partial change.
        let made = catch_unwind(AssertUnwindSafe(|| (self.work)(job.task, &is_wanted)));
        let made = made.unwrap_or_else(|_| {
            Err(ApiError::from_cause(Cause::Internal, "the text could not be tokenised"))
        });
        self.answers.send(TextResult { key: job.key, made }).map_err(|_| ())?;
        self.ctl.notify();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::tokenize::DetokenizeRequest;
    use crate::ids::RequestKey;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    fn queue(
        work: impl Fn(TextTask) -> Result<TextOutput, ApiError> + Send + Sync + 'static,
    ) -> TextQueue {
        TextQueue::over(
            Arc::new(move |task, _: &dyn Fn() -> bool| work(task)),
            4,
            Arc::new(EventCount::new(|| {})),
        )
        .unwrap()
    }

    fn answer(queue: &TextQueue) -> TextResult {
        let begun = Instant::now();
        loop {
            if let Some(answer) = queue.poll() {
                return answer;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "no answer");
            std::thread::yield_now();
        }
    }

    fn job(key: u64, tokens: usize) -> TextJob {
        TextJob {
            key: RequestKey(key),
            task: TextTask::Detokenize(DetokenizeRequest { model: None, tokens: vec![1; tokens] }),
        }
    }

    #[test]
    fn a_panic_ends_its_request_and_not_the_thread() {
        let queue = queue(|task| match task {
            TextTask::Detokenize(asked) if asked.tokens.is_empty() => {
                panic!("a fault in a tokeniser")
            }
            _ => Ok(TextOutput::Body(b"well".to_vec())),
        });
        let _tickets = [queue.submit(job(0, 0)).unwrap(), queue.submit(job(7, 1)).unwrap()];
        let failed = answer(&queue);
        assert_eq!((failed.key.0, failed.made.unwrap_err().status), (0, 500));
        let well = answer(&queue);
        assert!(
            well.key.0 == 7 && matches!(well.made, Ok(TextOutput::Body(body)) if body == b"well")
        );
    }

    #[test]
    fn a_short_text_does_not_wait_for_a_long_one() {
        let (open, gate) = crossbeam_channel::bounded::<()>(0);
        let queue = queue(move |task| {
            if task.size() > TOKENISE_SHORT {
                gate.recv().unwrap();
            }
            Ok(TextOutput::Body(Vec::new()))
        });
        let _tickets = [
            queue.submit(job(0, TOKENISE_SHORT + 1)).unwrap(),
            queue.submit(job(1, TOKENISE_SHORT)).unwrap(),
        ];
        assert_eq!(answer(&queue).key.0, 1);
        open.send(()).unwrap();
        assert_eq!(answer(&queue).key.0, 0);
    }

    #[test]
    fn a_job_that_was_cancelled_is_not_begun() {
        let (open, gate) = crossbeam_channel::bounded::<()>(0);
        let begun = Arc::new(AtomicUsize::new(0));
        let count = begun.clone();
        let queue = queue(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            gate.recv().unwrap();
            Ok(TextOutput::Body(Vec::new()))
        });
        let first = queue.submit(job(0, 1)).unwrap();
        while begun.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        let second = queue.submit(job(1, 1)).unwrap();
        let _third = queue.submit(job(2, 1)).unwrap();
        drop((first, second));
        (0..2).for_each(|_| open.send(()).unwrap());
        assert_eq!([answer(&queue).key.0, answer(&queue).key.0], [0, 2]);
        assert_eq!(begun.load(Ordering::Relaxed), 2);
    }
}
