//! The measuring of rows: providers take turns in rounds, so that whatever else the machine does
//! falls on all of them.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::time::{Duration, Instant};

use super::folder::Folder;
use super::inputs::InputFiles;
use super::interrupt;
use super::process::{Silence, Worker};
use super::select::Table;
use super::statistics::Spread;
use super::truth::{Truth, tolerance};
use crate::case::{Metric, Mode, TensorSpec, bytes_of};
use crate::gpu::Gpu;
use crate::machine::Machine;
use crate::peers::{Peer, Start};
use crate::protocol::{Alloc, Input, Job, Reply, Request};
use crate::published;
use crate::record::Record;

const MIB: f64 = (1 << 20) as f64;

/// A worker that has crashed or hung this often, with no answer in between, is not started again for rows
/// that take as much memory.
const DEATHS: usize = 3;

/// Before each turn: threads of another provider may look out for their next call for a while
/// before they leave the CPU to others (those of PyTorch's OpenMP for 3 to 8 ms of CPU time after a
/// relu, on an Emerald Rapids). So all workers have to be found idle several times, this long after each
/// other.
const PAUSE: Duration = Duration::from_millis(2);
const IDLE: usize = 2;

/// The longest pause: for a worker that is never idle, and where the system does not tell.
const LONGEST_PAUSE: Duration = Duration::from_millis(40);

/// Calls that take longer than this, in nanoseconds, are timed in half of the rounds: three calls tell enough.
const SLOW: f64 = 0.5e9;

/// How much is measured.
#[derive(Debug, Clone, Copy)]
pub(super) struct Effort {
    /// Rounds that every row has, and at most.
    pub(super) rounds: (usize, usize),
    /// Rounds beyond the least are begun within this time.
    pub(super) time: Duration,
    /// How long a worker may take for one answer.
    pub(super) patience: Duration,
}

impl Effort {
    pub(super) const QUICK: Self = Self {
        rounds: (5, 15),
        time: Duration::from_millis(250),
        patience: Duration::from_secs(600),
    };
    pub(super) const FULL: Self =
        Self { rounds: (5, 40), time: Duration::from_secs(3), ..Self::QUICK };
}

/// Why a sweep ends early.
pub(super) enum Stop {
    Interrupted,
    Failed(String),
}

impl From<String> for Stop {
    fn from(why: String) -> Self {
        Self::Failed(why)
    }
}

/// A worker is one provider in one regime; memory is measured in a process of its own, and so is
/// the rate on one thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    provider: &'static str,
    alloc: Alloc,
    threads: usize,
    memory: bool,
}

impl Key {
    /// The worker that is timed.
    fn timed(peer: &dyn Peer, alloc: Alloc, threads: usize) -> Self {
        Self { provider: peer.name(), alloc, threads, memory: false }
    }
}

/// What a worker gives. The error of the inner result is a note: this provider has no answer, others may.
type Answer<T> = Result<Result<T, String>, Stop>;

pub(super) struct Sweep<'a> {
    pub(super) peers: &'a [Box<dyn Peer>],
    pub(super) threads: usize,
    pub(super) effort: Effort,
    pub(super) folder: Folder,
    inputs: InputFiles,
    workers: HashMap<Key, Worker>,
    deaths: HashMap<&'static str, Deaths>,
    /// [`Sweep::memory_of`] the row at hand.
    row_memory: u64,
    /// Bytes per second of one thread on data that stays in cache, by table.
    rates: HashMap<String, Option<f64>>,
    l2_bytes: u64,
}

/// How often a provider's worker has died since its last answer.
struct Deaths {
    count: usize,
    /// The least memory of a row in which it did.
    memory: u64,
    last: String,
}

/// What a provider has come to in a row.
enum State {
    /// Prepared, with right outputs.
    Ready { error: Option<f64>, ns: Vec<f64>, estimate: f64 },
    /// No result, for now or for good.
    Out { error: Option<f64>, note: String, again: bool },
}

impl State {
    /// For a reason that may pass.
    fn out(note: impl Into<String>) -> Self {
        Self::Out { error: None, note: note.into(), again: true }
    }

    /// From an answer that is no result.
    fn refused(reply: Reply) -> Self {
        let again = !matches!(reply, Reply::Unsupported { .. });
        Self::Out { error: None, note: refusal(reply), again }
    }

    fn wrong(error: f64, note: String) -> Self {
        Self::Out { error: Some(error.min(f64::MAX)), note, again: false }
    }
}

/// A row of a table: one size in one regime.
#[derive(Clone, Copy)]
struct Row<'t> {
    table: &'t Table,
    n: usize,
    alloc: Alloc,
}

impl Row<'_> {
    /// The inputs of its call.
    fn inputs(self) -> Vec<TensorSpec> {
        self.table.case.inputs(self.table.mode, self.n, self.table.dtype.0)
    }
}

impl<'a> Sweep<'a> {
    pub(super) fn new(
        peers: &'a [Box<dyn Peer>],
        threads: usize,
        effort: Effort,
        folder: Folder,
    ) -> Result<Self, String> {
        let l2 = folder.run.machine.caches.l2.map_or(1 << 20, |cache| cache.bytes);
        Ok(Self {
            peers,
            threads,
            effort,
            folder,
            inputs: InputFiles::new()?,
            workers: HashMap::new(),
            deaths: HashMap::new(),
            row_memory: 0,
            rates: HashMap::new(),
            l2_bytes: l2,
        })
    }

    /// The providers of a table.
    fn providers(&self, table: &Table) -> Vec<&'a dyn Peer> {
        let peers = self.peers.iter().map(|peer| &**peer);
        let peers = peers.filter(|peer| peer.applies(&table.case.operator));
        peers.filter(|peer| table.metric == Metric::Speed || peer.name() != "copy").collect()
    }

    /// Roughly the memory that a row takes: of all providers at once for speed, one by one for memory.
    pub(super) fn memory_of(&self, table: &Table, n: usize) -> u64 {
        let needs = self.providers(table).into_iter().map(|peer| need(peer, table, n) as u64);
        match table.metric {
            Metric::Speed => needs.sum(),
            Metric::Memory => needs.max().unwrap_or(0),
        }
    }

    /// Measures a row, and keeps its records. One that is complete is not measured again; one that
    /// is not, as a whole: only results of the same rounds can be compared.
    pub(super) fn row(
        &mut self,
        table: &Table,
        n: usize,
        alloc: Alloc,
    ) -> Result<Vec<Record>, Stop> {
        let peers = self.providers(table);
        if peers.iter().all(|peer| self.folder.is_done(&table.name, n, peer.name(), alloc)) {
            return Ok(Vec::new());
        }
        self.folder.forget(&table.name, n, alloc)?;
        self.row_memory = self.memory_of(table, n);
        let row = Row { table, n, alloc };
        let mut records = match table.metric {
            Metric::Speed => self.speed(row, &peers)?,
            Metric::Memory => self.memory(row, &peers)?,
        };
        let device = self.folder.run.gpu.as_ref().map(|gpu| &gpu.name);
        for record in &mut records {
            record.device = device.cloned();
        }
        self.folder.add(&records)?;
        Ok(records)
    }

    fn speed(&mut self, row: Row<'_>, peers: &[&'a dyn Peer]) -> Result<Vec<Record>, Stop> {
        let Row { table, n, alloc } = row;
        let Table { case, mode, dtype, .. } = table;
        let rate = self.rate(table)?;
        let specs = row.inputs();
        let moved = case.moved_bytes(*mode, n, dtype.0);
        let mut states: BTreeMap<&str, State> = BTreeMap::new();

        let (mapped, refused) = self.fit(row, peers);
        for (name, note) in refused {
            states.insert(name, State::out(note));
        }
        let left = peers.iter().filter(|peer| !states.contains_key(peer.name()));
        let left: Vec<&dyn Peer> = left.copied().collect();
        if !left.is_empty() {
            let inputs = match self.inputs.provide(&specs) {
                Ok(inputs) => inputs,
                Err(why) => return Ok(without_inputs(row, peers, &why)),
            };
            let truth = Truth::of(case, *mode, n, dtype.0, &inputs)?;
            let mut job = self.job(row, inputs);
            job.mapped = mapped;
            // All prepare at the same time, as compilers take a while, mostly on one thread; but for the
            // copy, which finds out what is fastest.
            let (copies, others): (Vec<&dyn Peer>, Vec<&dyn Peer>) =
                left.iter().partition(|peer| peer.name() == "copy");
            let mut sent = Vec::new();
            for &peer in &others {
                let request = Request::Prepare { job: job.clone() };
                sent.push(self.send(peer, Key::timed(peer, alloc, self.threads), &request)?);
            }
            for (&peer, sent) in others.iter().zip(sent) {
                states.insert(peer.name(), self.prepared(peer, &job, sent, Some(&truth))?);
            }
            for peer in copies {
                let n = usize::try_from(moved / 2).unwrap_or(usize::MAX);
                let job = Job { n, inputs: Vec::new(), ..job.clone() };
                self.pause();
                let request = Request::Prepare { job: job.clone() };
                let sent = self.send(peer, Key::timed(peer, alloc, self.threads), &request)?;
                states.insert(peer.name(), self.prepared(peer, &job, sent, None)?);
            }
            self.rounds(alloc, &left, &mut states)?;
            for &peer in &left {
                let _ = self.ask(peer, Key::timed(peer, alloc, self.threads), &Request::Release)?;
            }
        }

        let spreads: BTreeMap<&str, Spread> = states
            .iter()
            .filter_map(|(&name, state)| match state {
                State::Ready { ns, .. } => Some((name, Spread::of(ns)?)),
                State::Out { .. } => None,
            })
            .collect();
        let copy = spreads.get("copy").map(|spread| spread.median);
        let mut records = Vec::new();
        for &peer in peers {
            let name = peer.name();
            let spread = spreads.get(name);
            let mut record = blank(row, name);
            record.bytes = Some(moved);
            if let Some(spread) = spread {
                record.value = Some(spread.median / 1e6);
                record.p20 = Some(spread.p20 / 1e6);
                record.p80 = Some(spread.p80 / 1e6);
                if let (Some(copy), true) = (copy, moved > 0) {
                    record.of_copy_limit = Some(copy / spread.median);
                    if let (Some(rate), true) = (rate, name.starts_with("fuselane")) {
                        let in_cache = moved as f64 / (rate * self.threads as f64) * 1e9;
                        record.of_roofline = Some(copy.max(in_cache) / spread.median);
                    }
                }
            }
            match states.remove(name) {
                Some(State::Ready { error, ns, .. }) => {
                    (record.ok, record.error, record.calls) = (!ns.is_empty(), error, ns.len());
                    if mapped && peer.can_map() {
                        record.note = "inputs mapped from files: memory holds one copy".to_owned();
                    }
                }
                Some(State::Out { error, note, again }) => {
                    (record.error, record.note, record.again) = (error, note, again);
                }
                None => {}
            }
            records.push(record);
        }
        Ok(records)
    }

    fn job(&self, row: Row<'_>, inputs: Vec<Input>) -> Job {
        let Row { table, n, alloc } = row;
        Job {
            operator: table.case.operator,
            mode: table.mode,
            dtype: table.dtype,
            n,
            threads: self.threads,
            alloc,
            inputs,
            mapped: false,
        }
    }

    /// Waits until a provider that was asked to prepare a job is ready, and compares its outputs with
    /// the truth.
    fn prepared(
        &mut self,
        peer: &'a dyn Peer,
        job: &Job,
        sent: Result<(), String>,
        truth: Option<&Truth>,
    ) -> Result<State, Stop> {
        let key = Key::timed(peer, job.alloc, job.threads);
        let answer = match sent {
            Ok(()) => self.receive(key)?,
            Err(note) => Err(note),
        };
        match answer {
            Ok(Reply::Ready) => {}
            Ok(other) => return Ok(State::refused(other)),
            Err(note) => return Ok(State::out(note)),
        }
        let mut error = None;
        if let Some(truth) = truth {
            let folder = self.inputs.folder().join("outputs");
            let cleared = fs::remove_dir_all(&folder).is_ok() || !folder.exists();
            if let (false, _) | (_, Err(_)) = (cleared, fs::create_dir_all(&folder)) {
                return Err(Stop::Failed(format!("cannot make {}", folder.display())));
            }
            let request = Request::Outputs { samples: truth.samples(), folder: folder.clone() };
            match self.ask(peer, key, &request)? {
                Ok(Reply::Written) => {}
                Ok(other) => return Ok(State::refused(other)),
                Err(note) => return Ok(State::out(note)),
            }
            let (found, limit) = match truth.error(&folder) {
                Ok(found) => (found, tolerance(job.dtype.0)),
                Err(note) => return Ok(State::wrong(f64::MAX, note)),
            };
            if found > limit {
                let note = if found.is_finite() {
                    format!("wrong result: off by {found:.0} ulp, {limit} are allowed; not timed")
                } else {
                    "wrong result: NaN; not timed".to_owned()
                };
                return Ok(State::wrong(found, note));
            }
            error = Some(found);
        }
        Ok(State::Ready { error, ns: Vec::new(), estimate: 0.0 })
    }

    /// The timed rounds, until the medians are stable or the time is up.
    fn rounds(
        &mut self,
        alloc: Alloc,
        peers: &[&'a dyn Peer],
        states: &mut BTreeMap<&str, State>,
    ) -> Result<(), Stop> {
        let (least, most) = self.effort.rounds;
        let (start, mut paused) = (Instant::now(), Duration::ZERO);
        for round in 0..=most {
            if round > least {
                let stable = states.values().all(|state| match state {
                    State::Ready { ns, .. } => Spread::of(ns).is_some_and(|s| s.width() < 0.05),
                    State::Out { .. } => true,
                });
                if stable || start.elapsed().saturating_sub(paused) > self.effort.time {
                    break;
                }
            }
            for turn in 0..peers.len() {
                // Another one goes first in each round, and every other round goes backwards, so
                // that nobody always follows the same one.
                let turn = if round % 2 == 0 { turn } else { peers.len() - 1 - turn };
                let peer = peers[(turn + round / 2) % peers.len()];
                let Some(State::Ready { ns, estimate, .. }) = states.get_mut(peer.name()) else {
                    continue;
                };
                // Of four rounds the first two, one of each order.
                if *estimate > SLOW && round % 4 >= 2 {
                    continue;
                }
                // The first round only tells how long a call takes: others are then repeated for
                // some milliseconds, after one call that brings its data back into the caches.
                let calls = (4e6 / estimate.max(4e6 / 64.0)).ceil().max(1.0) as usize;
                let first = round == 0;
                let request = Request::Round {
                    calls: if first { 1 } else { calls },
                    settle: !first && *estimate < 20e6,
                };
                let key = Key::timed(peer, alloc, self.threads);
                paused += self.pause();
                let note = match self.ask(peer, key, &request)? {
                    Ok(Reply::Times { ns: times }) => {
                        let times: Vec<f64> = times.iter().map(|&ns| ns as f64).collect();
                        *estimate = Spread::of(&times).map_or(0.0, |spread| spread.median);
                        if !first {
                            ns.extend(times);
                        }
                        continue;
                    }
                    Ok(other) => refusal(other),
                    Err(note) => note,
                };
                states.insert(peer.name(), State::out(note));
            }
        }
        Ok(())
    }

    /// Waits until all workers are idle, and tells how long that was.
    fn pause(&self) -> Duration {
        let (start, mut idle) = (Instant::now(), 0);
        while idle < IDLE && start.elapsed() < LONGEST_PAUSE {
            std::thread::sleep(PAUSE);
            let is_idle = |worker: &Worker| worker.is_running() == Some(false);
            idle = if self.workers.values().all(is_idle) { idle + 1 } else { 0 };
        }
        start.elapsed()
    }

    /// The rate of ours on one thread with data that stays in the second-level cache: what the
    /// arithmetic allows.
    fn rate(&mut self, table: &Table) -> Result<Option<f64>, Stop> {
        if self.folder.run.gpu.is_some() {
            return Ok(None);
        }
        if let Some(&rate) = self.rates.get(&table.name) {
            return Ok(rate);
        }
        let case = table.case.small();
        let small = Table { case, ..table.clone() };
        let moved = |n: usize| small.case.moved_bytes(small.mode, n, small.dtype.0);
        let mut n = 1;
        while moved(n + 1) <= self.l2_bytes / 2 && n < 1 << 16 {
            n += 1;
        }
        let Some(&peer) = self.peers.iter().map(|peer| &**peer).collect::<Vec<_>>().first() else {
            return Ok(None);
        };
        let mut rate = None;
        if moved(n) > 0 {
            let row = Row { table: &small, n, alloc: Alloc::Warm };
            let inputs = self.inputs.provide(&row.inputs())?;
            let job = Job { threads: 1, ..self.job(row, inputs) };
            let request = Request::Prepare { job };
            let key = Key::timed(peer, Alloc::Warm, 1);
            if let Ok(Reply::Ready) = self.ask(peer, key, &request)? {
                self.pause();
                let request = Request::Round { calls: 200, settle: true };
                if let Ok(Reply::Times { ns }) = self.ask(peer, key, &request)? {
                    let ns: Vec<f64> = ns.iter().map(|&ns| ns as f64).collect();
                    rate = Spread::of(&ns).map(|spread| moved(n) as f64 / spread.median * 1e9);
                }
                let _ = self.ask(peer, key, &Request::Release)?;
            }
        }
        self.rates.insert(table.name.clone(), rate);
        Ok(rate)
    }

    fn memory(&mut self, row: Row<'_>, peers: &[&'a dyn Peer]) -> Result<Vec<Record>, Stop> {
        let Row { table, n, alloc } = row;
        let Table { case, mode, dtype, .. } = table;
        let specs = row.inputs();
        let mut records = Vec::new();
        for &peer in peers {
            let mut record = blank(row, peer.name());
            record.least_bytes = Some(case.least_extra_bytes(*mode, n, dtype.0));
            let (mapped, mut refused) = self.fit(row, &[peer]);
            let answer = match refused.pop() {
                Some((_, note)) => Err(note),
                None => {
                    let inputs = match self.inputs.provide(&specs) {
                        Ok(inputs) => inputs,
                        Err(why) => return Ok(without_inputs(row, peers, &why)),
                    };
                    let job = Job { mapped, ..self.job(row, inputs) };
                    let key = Key { memory: true, ..Key::timed(peer, alloc, self.threads) };
                    self.ask(peer, key, &Request::Memory { job })?
                }
            };
            match answer {
                Ok(Reply::Memory { extra_bytes }) => {
                    let all = bytes_of(&specs) + extra_bytes;
                    (record.ok, record.calls) = (true, 1);
                    record.bytes = Some(extra_bytes);
                    record.value = Some(all as f64 / MIB);
                    if let Some(wrong) = self.wrong(row, peer.name()) {
                        (record.ok, record.value) = (false, None);
                        (record.error, record.note) = (Some(wrong), "wrong result".to_owned());
                    }
                }
                Ok(other) => {
                    record.again = !matches!(other, Reply::Unsupported { .. });
                    record.note = refusal(other);
                }
                Err(note) => (record.note, record.again) = (note, true),
            }
            records.push(record);
        }
        Ok(records)
    }

    /// The error of a result that the speed table of the same call has found wrong.
    fn wrong(&self, row: Row<'_>, provider: &str) -> Option<f64> {
        let Row { table, n, .. } = row;
        let speed = table.case.table(Metric::Speed, table.mode, table.dtype.0);
        let of_call = |record: &&Record| (&*record.table, record.n) == (&*speed, n);
        let records = self.folder.records.iter().filter(of_call);
        records.filter(|record| record.provider == provider && !record.ok).find_map(|r| r.error)
    }

    /// Which providers a row has memory for: whether inputs have to be shared for that, and those
    /// that have to stay out, with a note.
    fn fit(&mut self, row: Row<'_>, peers: &[&'a dyn Peer]) -> (bool, Vec<(&'static str, String)>) {
        let Row { table, n, .. } = row;
        if let Some(note) = self.folder.run.gpu.as_ref().and_then(|gpu| refused_by(gpu, table, n)) {
            return (false, peers.iter().map(|peer| (peer.name(), note.clone())).collect());
        }
        let specs = row.inputs();
        let inputs = bytes_of(&specs) as f64;
        // Bytes of each provider, and how many of them are inputs that could be shared.
        type Need = (&'static str, f64, f64);
        let mut needs: Vec<Need> = Vec::new();
        for &peer in peers {
            let shareable = if peer.can_map() { inputs } else { 0.0 };
            needs.push((peer.name(), need(peer, table, n), shareable));
        }
        // Files may be in memory. Those of earlier rows stay, if there is room.
        let available = |files: &InputFiles| {
            let bytes = Machine::read().available_memory_bytes;
            // A tenth is left to the system.
            bytes.map_or(f64::INFINITY, |bytes| (bytes + files.bytes()) as f64 * 0.9)
        };
        let needed = needs.iter().map(|need| need.1).sum::<f64>();
        if self.inputs.bytes_with(&specs) as f64 + needed <= available(&self.inputs) {
            return (false, Vec::new());
        }
        self.inputs.shrink_to(&specs);
        let mut room = available(&self.inputs);
        if inputs + needed > room {
            // Idle workers may hold on to memory of earlier rows.
            self.workers.clear();
            room = available(&self.inputs);
        }
        if inputs + needed <= room {
            return (false, Vec::new());
        }
        let shared = |needs: &[Need]| {
            inputs + needs.iter().map(|need| (need.1 - need.2).max(0.0)).sum::<f64>()
        };
        let mut refused = Vec::new();
        while shared(&needs) > room && !needs.is_empty() {
            // The hungriest goes; ours goes last.
            let by_hunger = |a: &&Need, b: &&Need| {
                let ours = |name| matches!(name, "fuselane" | "fuselane_gpu");
                let peers = (!ours(a.0)).cmp(&!ours(b.0));
                peers.then((a.1 - a.2).total_cmp(&(b.1 - b.2)))
            };
            let Some(&(name, bytes, shareable)) = needs.iter().max_by(by_hunger) else { break };
            let gib = |bytes: f64| bytes / MIB / 1024.0;
            let note = format!(
                "does not fit in memory: needs about {:.1} GiB beside {:.1} GiB for the others, {:.1} GiB are free",
                gib(bytes),
                gib((shared(&needs) - (bytes - shareable).max(0.0)).max(0.0)),
                gib(room),
            );
            refused.push((name, note));
            needs.retain(|need| need.0 != name);
        }
        (true, refused)
    }

    /// Asks a provider's worker, which is started if it is not up.
    fn ask(&mut self, peer: &'a dyn Peer, key: Key, request: &Request) -> Answer<Reply> {
        match self.send(peer, key, request)? {
            Ok(()) => self.receive(key),
            Err(note) => Ok(Err(note)),
        }
    }

    /// [`Sweep::ask`], without waiting for the answer, which [`Sweep::receive`] does.
    fn send(&mut self, peer: &'a dyn Peer, key: Key, request: &Request) -> Answer<()> {
        if interrupt::asked() {
            return Err(Stop::Interrupted);
        }
        let deaths = self.deaths.get(key.provider);
        if let Some(Deaths { memory, last, .. }) = deaths.filter(|deaths| deaths.count >= DEATHS)
            && self.row_memory >= *memory
        {
            return Ok(Err(format!("given up after {DEATHS} failures, the last: {last}")));
        }
        let sent = match self.workers.get_mut(&key) {
            Some(worker) => worker.send(request),
            None if !matches!(request, Request::Prepare { .. } | Request::Memory { .. }) => {
                return Ok(Err("its worker is gone".to_owned()));
            }
            None => self.start(peer, &key)?.and_then(|worker| worker.send(request)),
        };
        sent.map_or_else(|silence| self.silent(&key, silence).map(Err), |()| Ok(Ok(())))
    }

    /// The answer to what was sent.
    fn receive(&mut self, key: Key) -> Answer<Reply> {
        let patience = self.effort.patience;
        let Some(worker) = self.workers.get_mut(&key) else {
            return Ok(Err("its worker is gone".to_owned()));
        };
        match worker.answer(patience) {
            Ok(reply) => {
                if !matches!(reply, Reply::Failed { .. }) {
                    self.deaths.remove(key.provider); // it works again
                }
                Ok(Ok(reply))
            }
            Err(silence) => self.silent(&key, silence).map(Err),
        }
    }

    /// The note about a worker that gave no answer.
    fn silent(&mut self, key: &Key, silence: Silence) -> Result<String, Stop> {
        match silence {
            Silence::Interrupted => Err(Stop::Interrupted),
            Silence::Dead(why) => {
                self.workers.remove(key);
                let (count, memory) = match self.deaths.get(key.provider) {
                    Some(deaths) => (deaths.count + 1, deaths.memory.min(self.row_memory)),
                    None => (1, self.row_memory),
                };
                self.deaths.insert(key.provider, Deaths { count, memory, last: why.clone() });
                Ok(why)
            }
        }
    }

    fn start(&mut self, peer: &dyn Peer, key: &Key) -> Result<Result<&mut Worker, Silence>, Stop> {
        let start = Start { threads: key.threads, alloc: key.alloc };
        let command = match peer.command(start) {
            Ok(command) => command,
            Err(why) => return Ok(Err(Silence::Dead(why))),
        };
        match Worker::start(key.provider, command, &self.folder.log(key.provider)) {
            Err(silence) => Ok(Err(silence)),
            Ok((worker, versions)) => {
                if !versions.is_empty() && !self.folder.run.versions.contains_key(key.provider) {
                    self.folder.run.versions.insert(key.provider.to_owned(), versions);
                    self.folder.write_run()?;
                }
                Ok(Ok(self.workers.entry(*key).or_insert(worker)))
            }
        }
    }
}

/// Why a row is too large for a device.
fn refused_by(gpu: &Gpu, table: &Table, n: usize) -> Option<String> {
    let Table { case, mode, dtype, .. } = table;
    let mut tensors = case.inputs(*mode, n, dtype.0);
    tensors.extend(case.outputs(*mode, n, dtype.0));
    if *mode == Mode::Bwd {
        tensors.extend(case.outputs(Mode::Fwd, n, dtype.0));
    }
    let largest = tensors.iter().map(|tensor| bytes_of(std::slice::from_ref(tensor))).max();
    gpu.refuses(largest.unwrap_or(0), bytes_of(&tensors))
}

/// Roughly the most that a provider's process has at one time, inputs and all.
fn need(peer: &dyn Peer, table: &Table, n: usize) -> f64 {
    let Table { case, mode, dtype, .. } = table;
    if peer.name() == "copy" {
        return case.moved_bytes(*mode, n, dtype.0) as f64;
    }
    // What a GPU needed for the same is the best guess there is.
    let name = case.table(Metric::Memory, *mode, fuselane::DType::BF16);
    let wide = dtype.0.size() as f64 / 2.0;
    if let Some(published) = published::find(&name, n) {
        let guess = match peer.name() {
            "torch" => published.eager.map(|mib| 1.3 * mib),
            "torch_compile" => published.compiled.map(|mib| 1.6 * mib),
            _ => None,
        };
        if let Some(mib) = guess {
            return mib * MIB * wide;
        }
    }
    let mut bytes =
        bytes_of(&case.inputs(*mode, n, dtype.0)) + bytes_of(&case.outputs(*mode, n, dtype.0));
    if *mode == Mode::Bwd {
        bytes += bytes_of(&case.outputs(Mode::Fwd, n, dtype.0));
    }
    bytes as f64 * peer.memory_factor()
}

/// A note from an answer that is no result.
fn refusal(reply: Reply) -> String {
    match reply {
        Reply::Unsupported { why } => why,
        Reply::Failed { why } => format!("failed: {why}"),
        other => format!("answered {other:?}"),
    }
}

/// The records of a row whose inputs could not be made.
fn without_inputs(row: Row<'_>, peers: &[&dyn Peer], why: &str) -> Vec<Record> {
    let record =
        |peer: &&dyn Peer| Record { note: why.to_owned(), again: true, ..blank(row, peer.name()) };
    peers.iter().map(record).collect()
}

/// A record without a result.
fn blank(row: Row<'_>, provider: &str) -> Record {
    let Row { table, n, alloc } = row;
    Record {
        table: table.name.clone(),
        family: table.case.family.clone(),
        title: table.case.title.clone(),
        operator: table.case.operator.name().to_owned(),
        metric: table.metric,
        mode: table.mode,
        n,
        dtype: table.dtype.to_string(),
        provider: provider.to_owned(),
        alloc,
        device: None,
        value: None,
        p20: None,
        p80: None,
        unit: table.metric.unit().to_owned(),
        bytes: None,
        least_bytes: None,
        of_copy_limit: None,
        of_roofline: None,
        error: None,
        ok: false,
        note: String::new(),
        calls: 0,
        again: false,
    }
}
