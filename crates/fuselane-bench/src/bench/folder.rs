//! A run's folder: `run.json` with its facts, `results.jsonl` with a record per line, written as
//! they come and sorted in the end, `results.csv` with the same at the end, and `logs/` with what workers had to say.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::protocol::Alloc;
use crate::record::{Record, Run};

/// The columns of the CSV, and the least that a line of JSON has.
const COLUMNS: [&str; 21] = [
    "table",
    "family",
    "operator",
    "metric",
    "mode",
    "n",
    "dtype",
    "provider",
    "alloc",
    "value",
    "p20",
    "p80",
    "unit",
    "bytes",
    "least_bytes",
    "of_copy_limit",
    "of_roofline",
    "error",
    "ok",
    "note",
    "device",
];

pub(super) struct Folder {
    path: PathBuf,
    results: File,
    pub(super) run: Run,
    pub(super) records: Vec<Record>,
    done: HashSet<(String, usize, String, Alloc)>,
}

impl Folder {
    /// A new run's. The folder is made; it may exist, if nothing is in it.
    pub(super) fn create(path: &Path, run: Run) -> Result<Self, String> {
        let at = path.display();
        fs::create_dir_all(path.join("logs"))
            .map_err(|error| format!("cannot make the folder {at}: {error}"))?;
        let results = path.join("results.jsonl");
        if results.exists() {
            return Err(format!(
                "{at} has results already: go on with `--resume {at}`, or give another --out"
            ));
        }
        let results = File::create_new(&results)
            .map_err(|error| format!("cannot write {}: {error}", results.display()))?;
        let folder = Self {
            path: path.to_path_buf(),
            results,
            run,
            records: Vec::new(),
            done: HashSet::new(),
        };
        folder.write_run()?;
        Ok(folder)
    }

    /// One that was begun before.
    pub(super) fn resume(path: &Path) -> Result<Self, String> {
        let (run, records, whole) = read(path)?;
        fs::create_dir_all(path.join("logs"))
            .map_err(|error| format!("cannot make {}/logs: {error}", path.display()))?;
        let results = path.join("results.jsonl");
        let fault = |error| format!("cannot write {}: {error}", results.display());
        let file = File::options().append(true).open(&results).map_err(fault)?;
        // The rest is a line that was not finished.
        file.set_len(whole).map_err(fault)?;
        let done = done(&records);
        Ok(Self { path: path.to_path_buf(), results: file, run, records, done })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn log(&self, provider: &str) -> PathBuf {
        self.path.join("logs").join(format!("{provider}.txt"))
    }

    pub(super) fn is_done(&self, table: &str, n: usize, provider: &str, alloc: Alloc) -> bool {
        self.done.contains(&(table.to_owned(), n, provider.to_owned(), alloc))
    }

    /// Drops the records of a row that is to be measured as a whole.
    pub(super) fn forget(&mut self, table: &str, n: usize, alloc: Alloc) -> Result<(), String> {
        let of_row =
            |record: &Record| (&*record.table, record.n, record.alloc) == (table, n, alloc);
        if !self.records.iter().any(of_row) {
            return Ok(());
        }
        self.records.retain(|record| !of_row(record));
        self.done = done(&self.records);
        self.rewrite()
    }

    /// Brings the records into the order of the tables, whatever was measured first.
    pub(super) fn sort(&mut self, tables: &[&str]) -> Result<(), String> {
        let place =
            |name: &str| tables.iter().position(|table| *table == name).unwrap_or(tables.len());
        let key = |record: &Record| (place(&record.table), record.alloc, record.n);
        if self.records.is_sorted_by_key(key) {
            return Ok(());
        }
        self.records.sort_by_cached_key(key); // stable: providers stay in their order
        self.rewrite()
    }

    fn rewrite(&mut self) -> Result<(), String> {
        let path = self.path.join("results.jsonl");
        write_whole(&path, &lines(&self.records)?)?;
        // The file of that name is another one now.
        let file = File::options().append(true).open(&path);
        self.results = file.map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        Ok(())
    }

    /// Keeps the records of a row, all or none.
    pub(super) fn add(&mut self, records: &[Record]) -> Result<(), String> {
        let text = lines(records)?;
        let length = self.results.metadata().map(|data| data.len());
        let written = self.results.write_all(text.as_bytes()).and_then(|()| self.results.flush());
        if let Err(error) = written {
            // A part of a line would be taken for the end of the file.
            if let Ok(length) = length {
                let _ = self.results.set_len(length);
            }
            return Err(format!(
                "cannot write {}: {error}; what was measured before is kept, go on with \
                 `fuselane bench --resume {}`",
                self.path.join("results.jsonl").display(),
                self.path.display()
            ));
        }
        self.done.extend(done(records));
        self.records.extend_from_slice(records);
        Ok(())
    }

    pub(super) fn write_run(&self) -> Result<(), String> {
        let text = serde_json::to_string_pretty(&self.run).map_err(|error| error.to_string())?;
        write_whole(&self.path.join("run.json"), &(text + "\n"))
    }

    pub(super) fn write_csv(&self) -> Result<(), String> {
        write_whole(&self.path.join("results.csv"), &csv(&self.records, true)?)
    }
}

/// What a resumed run does not measure again.
fn done(records: &[Record]) -> HashSet<(String, usize, String, Alloc)> {
    records.iter().filter(|record| !record.again).map(Record::key).collect()
}

/// Writes a file so that it is there whole or not at all.
fn write_whole(path: &Path, text: &str) -> Result<(), String> {
    let part = path.with_extension("part");
    // On the disk before it has its name: else a crash could leave the name without the text.
    let write = || {
        let mut file = File::create(&part)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&part, path)
    };
    write().map_err(|error: std::io::Error| {
        let _ = fs::remove_file(&part);
        format!("cannot write {}: {error}", path.display())
    })
}

/// Records as lines of JSON.
pub(super) fn lines(records: &[Record]) -> Result<String, String> {
    let mut text = String::new();
    for record in records {
        text += &serde_json::to_string(record).map_err(|error| error.to_string())?;
        text.push('\n');
    }
    Ok(text)
}

/// Records as CSV.
pub(super) fn csv(records: &[Record], heading: bool) -> Result<String, String> {
    let fault = |error: csv::Error| error.to_string();
    let mut writer = csv::Writer::from_writer(Vec::new());
    if heading {
        writer.write_record(COLUMNS).map_err(fault)?;
    }
    for record in records {
        let value = serde_json::to_value(record).map_err(|error| error.to_string())?;
        let field = |name: &&str| match &value[*name] {
            serde_json::Value::Null => String::new(),
            serde_json::Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        writer.write_record(COLUMNS.iter().map(field)).map_err(fault)?;
    }
    let bytes = writer.into_inner().map_err(|error| error.to_string())?;
    String::from_utf8(bytes).map_err(|error| error.to_string())
}

/// A run's facts and records, and the bytes of whole lines in its results. A last line that was
/// cut off is passed over.
fn read(path: &Path) -> Result<(Run, Vec<Record>, u64), String> {
    let at = path.join("run.json");
    let text = fs::read_to_string(&at)
        .map_err(|error| format!("{} is not the folder of a run: {error}", path.display()))?;
    let run = serde_json::from_str(&text).map_err(|error| format!("{}: {error}", at.display()))?;
    let at = path.join("results.jsonl");
    let text = fs::read_to_string(&at).map_err(|error| format!("{}: {error}", at.display()))?;
    let (mut records, mut whole) = (Vec::new(), 0);
    for (index, line) in text.split_inclusive('\n').enumerate() {
        match serde_json::from_str(line) {
            Ok(record) if line.ends_with('\n') => records.push(record),
            Ok(_) => break,
            Err(_) if !line.ends_with('\n') => break,
            Err(error) => return Err(format!("{}:{}: {error}", at.display(), index + 1)),
        }
        whole += line.len() as u64;
    }
    Ok((run, records, whole))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;
    use std::collections::BTreeMap;

    fn run() -> Run {
        Run {
            started: "2026-01-31T12:00:00Z".to_owned(),
            arguments: vec!["*relu*".to_owned()],
            fuselane: "0.1.0".to_owned(),
            commit: None,
            machine: Machine::read(),
            os: "linux".to_owned(),
            isa: "avx2".to_owned(),
            gpu: None,
            threads: 2,
            versions: BTreeMap::new(),
        }
    }

    fn record(n: usize) -> Record {
        Record {
            table: "a-table".to_owned(),
            n,
            value: Some(0.5),
            p20: Some(0.25),
            p80: Some(0.75),
            bytes: Some(1 << 40),
            of_copy_limit: Some(0.9),
            error: Some(0.5),
            note: "with, a comma".to_owned(),
            calls: 7,
            ..crate::record::tests::some()
        }
    }

    /// The table and size of each record in a folder.
    fn stored(path: &Path) -> Vec<(String, usize)> {
        let records = Folder::resume(path).unwrap().records;
        records.into_iter().map(|record| (record.table, record.n)).collect()
    }

    #[test]
    fn what_was_measured_is_not_measured_again() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("a/b");
        let mut folder = Folder::create(&path, run()).unwrap();
        folder.add(&[record(1), record(2)]).unwrap();
        assert!(Folder::create(&path, run()).err().unwrap().contains("--resume"));
        drop(folder);

        // A crash in the middle of a line.
        let results = path.join("results.jsonl");
        let mut text = fs::read_to_string(&results).unwrap();
        let whole = text.len();
        text.push_str(r#"{"table":"a-ta"#);
        fs::write(&results, &text).unwrap();
        let mut folder = Folder::resume(&path).unwrap();
        assert_eq!((folder.records.len(), folder.run.arguments.len()), (2, 1));
        assert!(folder.is_done("a-table", 2, "fuselane", Alloc::Warm));
        assert!(!folder.is_done("a-table", 3, "fuselane", Alloc::Warm));
        assert!(!folder.is_done("a-table", 2, "fuselane", Alloc::Fresh));
        assert_eq!(fs::read_to_string(&results).unwrap().len(), whole);
        let again = |n| Record { again: true, ..record(n) };
        folder.add(&[record(3), again(4), again(6)]).unwrap();
        let mut folder = Folder::resume(&path).unwrap();
        assert_eq!(folder.records.len(), 5);
        assert!(folder.is_done("a-table", 3, "fuselane", Alloc::Warm));
        for n in [4, 6] {
            assert!(!folder.is_done("a-table", n, "fuselane", Alloc::Warm), "a crash may pass");
            folder.forget("a-table", n, Alloc::Warm).unwrap();
        }
        folder.add(&[record(5)]).unwrap();
        assert_eq!(stored(&path), [1, 2, 3, 5].map(|n| ("a-table".to_owned(), n)));
    }

    #[test]
    fn records_are_sorted_as_the_tables_are() {
        let parent = tempfile::tempdir().unwrap();
        let mut folder = Folder::create(parent.path(), run()).unwrap();
        let other = |n| Record { table: "other".to_owned(), ..record(n) };
        folder.add(&[record(2), other(1), record(1), other(3)]).unwrap();
        folder.sort(&["other", "a-table"]).unwrap();
        folder.add(&[other(2)]).unwrap();
        folder.sort(&["other", "a-table"]).unwrap();
        let of = |table: &str, n| (table.to_owned(), n);
        let sorted =
            [of("other", 1), of("other", 2), of("other", 3), of("a-table", 1), of("a-table", 2)];
        assert_eq!(stored(parent.path()), sorted);
    }

    #[test]
    fn faults_name_the_place() {
        let parent = tempfile::tempdir().unwrap();
        let none = Folder::resume(&parent.path().join("none")).err().unwrap();
        assert!(none.contains("none is not the folder of a run"), "{none}");
        let file = parent.path().join("file");
        fs::write(&file, "").unwrap();
        let error = Folder::create(&file.join("below"), run()).err().unwrap();
        assert!(error.contains("cannot make the folder"), "{error}");

        let path = parent.path().join("bad");
        Folder::create(&path, run()).unwrap();
        fs::write(path.join("results.jsonl"), "nonsense\n").unwrap();
        let error = Folder::resume(&path).err().unwrap();
        assert!(error.contains("results.jsonl:1"), "{error}");
    }

    #[test]
    fn csv_has_what_json_has() {
        let text = csv(&[record(1)], true).unwrap();
        assert!(text.starts_with("table,family,operator,metric,mode,n,"));
        assert!(text.contains(r#"a-table,act,act,speed,fwd,1,bf16,fuselane,warm,0.5,0.25,0.75,ms,1099511627776,,0.9,,0.5,true,"with, a comma""#));
    }
}
