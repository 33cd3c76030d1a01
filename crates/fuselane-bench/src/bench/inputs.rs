//! The inputs of a row: made once, as files that all workers read.
//!
//! They are in memory where the system has a folder for that with room enough, so that reading them
//! is no matter of the disk. Values are nearly normal and repeat with a period of about a million elements, a
//! prime, so that no two slices of a tensor are alike; no operator's time depends on that.
//!
//! A tensor's file holds at least as many values as the row needs: it grows with longer rows, and
//! shorter ones read its beginning. Memory that is freed between rows would cost time: on a machine
//! of the cloud, it may go back to the host (14 s for a GiB until it could be written again, on one).

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use fuselane::reference::Random;
use fuselane::{DType, Theta};
use half::{bf16, f16};

use super::interrupt;
use crate::case::{Dtype, TensorSpec};
use crate::protocol::{Input, Sample};
use crate::setup_peers::free_bytes;

const PERIOD: usize = 1_048_573;

/// Where the system keeps files in memory.
const MEMORY: &str = "/dev/shm";

/// A folder of input files, removed in the end. Files stay for later rows until memory is short.
pub(super) struct InputFiles {
    folder: PathBuf,
    /// The repeated values of each tensor name and dtype, as bytes.
    blocks: HashMap<(&'static str, DType), Vec<u8>>,
    /// What is there, with its size in bytes.
    files: HashMap<PathBuf, u64>,
}

impl InputFiles {
    pub(super) fn new() -> Result<Self, String> {
        let memory = Path::new(MEMORY);
        remove_orphans(memory);
        let folder = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
        let mut files = Self { folder, blocks: HashMap::new(), files: HashMap::new() };
        let parent = files.folder.clone();
        files.move_to(&parent)?;
        Ok(files)
    }

    /// Begins anew in a folder of its own in `parent`.
    fn move_to(&mut self, parent: &Path) -> Result<(), String> {
        let folder = parent.join(format!("{PREFIX}{}", std::process::id()));
        if folder != self.folder {
            fs::create_dir_all(&folder).map_err(|error| {
                format!("no folder for inputs at {}: {error}", folder.display())
            })?;
            if !self.files.is_empty() {
                let _ = fs::remove_dir_all(&self.folder);
            }
            self.files.clear();
            interrupt::remove_at_end(folder.clone());
            self.folder = folder;
        }
        Ok(())
    }

    /// The bytes of all files, which take memory if they are there.
    pub(super) fn bytes(&self) -> u64 {
        self.files.values().sum()
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// [`InputFiles::bytes`] with files for these tensors among them.
    pub(super) fn bytes_with(&self, tensors: &[TensorSpec]) -> u64 {
        self.bytes() + self.missing(tensors)
    }

    /// The bytes of these tensors that are not there.
    fn missing(&self, tensors: &[TensorSpec]) -> u64 {
        let missing = |tensor| {
            let written = self.files.get(&self.path(tensor)).copied().unwrap_or(0);
            tensor.bytes().saturating_sub(written)
        };
        tensors.iter().map(missing).sum()
    }

    fn path(&self, tensor: &TensorSpec) -> PathBuf {
        self.folder.join(format!("{}-{}", tensor.name, tensor.dtype))
    }

    /// Gives back what is not needed for these tensors. No worker may have its files open.
    pub(super) fn shrink_to(&mut self, tensors: &[TensorSpec]) {
        let needed: HashMap<PathBuf, u64> =
            tensors.iter().map(|tensor| (self.path(tensor), tensor.bytes())).collect();
        self.files.retain(|path, bytes| {
            let Some(&needed) = needed.get(path) else {
                let _ = fs::remove_file(path);
                return false;
            };
            let shrunk = || File::options().write(true).open(path)?.set_len(needed);
            if *bytes > needed && shrunk().is_ok() {
                *bytes = needed;
            }
            true
        });
    }

    /// Makes files for these tensors.
    pub(super) fn provide(&mut self, tensors: &[TensorSpec]) -> Result<Vec<Input>, String> {
        // A container may have next to nothing there.
        let lacks_room = |files: &Self| {
            let needed = files.missing(tensors) + (16 << 20);
            free_bytes(&files.folder).is_some_and(|free| free < needed)
        };
        if self.folder.starts_with(MEMORY) && lacks_room(self) {
            self.shrink_to(tensors);
            if lacks_room(self) {
                self.move_to(&std::env::temp_dir())?;
            }
        }
        let mut inputs = Vec::new();
        for tensor in tensors {
            let path = self.path(tensor);
            let written = self.files.get(&path).copied().unwrap_or(0);
            if written < tensor.bytes() || tensor.name == "theta" {
                self.write(tensor, &path, written)
                    .map_err(|error| format!("input {}: {error}", path.display()))?;
                self.files.insert(path.clone(), tensor.bytes());
            }
            let (name, dtype) = (tensor.name.to_owned(), Dtype(tensor.dtype));
            inputs.push(Input { name, dtype, shape: tensor.shape.clone(), path });
        }
        Ok(inputs)
    }

    /// Writes a file, or what is missing behind its first `written` bytes.
    fn write(&mut self, tensor: &TensorSpec, path: &Path, written: u64) -> io::Result<()> {
        if tensor.name == "theta" {
            let frequencies = encode(DType::F32, &frequencies(tensor.shape[1]));
            return fs::write(path, frequencies.repeat(tensor.shape[0]));
        }
        let block = self
            .blocks
            .entry((tensor.name, tensor.dtype))
            .or_insert_with(|| encode(tensor.dtype, &values(tensor.name)));
        let mut file = File::options().create(true).append(true).open(path)?;
        let (mut at, end) = (written, tensor.bytes());
        while at < end {
            let start = (at % block.len() as u64) as usize;
            let part = ((end - at) as usize).min(block.len() - start);
            if let Err(error) = file.write_all(&block[start..start + part]) {
                let _ = file.set_len(written);
                return Err(error);
            }
            at += part as u64;
        }
        Ok(())
    }
}

const PREFIX: &str = "fuselane-";

/// Removes what a program that was killed has left.
fn remove_orphans(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.parse::<u32>().ok());
        if process.is_some_and(|process| !Path::new(&format!("/proc/{process}")).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

impl Drop for InputFiles {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// The values of a tensor, by its name, so that they are the same in every run.
fn values(name: &str) -> Vec<f64> {
    let seed = name.bytes().fold(17u64, |seed, byte| seed.wrapping_mul(31) + u64::from(byte));
    let mut normals = Random::new(seed).normals(PERIOD);
    if name == "weight" {
        normals.iter_mut().for_each(|value| *value = 1.0 + 0.1 * *value);
    }
    normals
}

/// The usual schedule, from 1 downwards.
fn frequencies(count: usize) -> Vec<f64> {
    let theta = Theta { dim: 2 * count, ..Theta::default() };
    theta.frequencies().unwrap_or_else(|_| vec![1.0; count])
}

fn encode(dtype: DType, values: &[f64]) -> Vec<u8> {
    match dtype {
        DType::F64 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::F32 => values.iter().flat_map(|&v| (v as f32).to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|&v| f16::from_f64(v).to_le_bytes()).collect(),
        DType::BF16 => values.iter().flat_map(|&v| bf16::from_f64(v).to_le_bytes()).collect(),
    }
}

/// Elements of an input's file.
pub(super) fn read(input: &Input, samples: &[Sample]) -> io::Result<Vec<f64>> {
    let dtype = input.dtype.0;
    let mut file = File::open(&input.path)?;
    let mut bytes = Vec::new();
    for sample in samples {
        for i in 0..sample.count {
            let start = (sample.start + i * sample.step) * dtype.size();
            file.seek(SeekFrom::Start(start as u64))?;
            let length = bytes.len();
            bytes.resize(length + sample.length * dtype.size(), 0);
            file.read_exact(&mut bytes[length..])?;
        }
    }
    Ok(decode(dtype, &bytes))
}

fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        DType::F64 => bytes.as_chunks().0.iter().map(|&b| f64::from_le_bytes(b)).collect(),
        DType::F32 => bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b).into()).collect(),
        DType::F16 => bytes.as_chunks().0.iter().map(|&b| f16::from_le_bytes(b).into()).collect(),
        DType::BF16 => bytes.as_chunks().0.iter().map(|&b| bf16::from_le_bytes(b).into()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use super::*;

    fn spec(name: &'static str, shape: &[usize], dtype: DType) -> TensorSpec {
        TensorSpec { name, shape: shape.to_vec(), dtype }
    }

    #[test]
    fn orphans_are_removed() {
        let parent = tempfile::tempdir().unwrap();
        let of = |process: u32| parent.path().join(format!("{PREFIX}{process}"));
        for process in [u32::MAX, std::process::id()] {
            fs::create_dir(of(process)).unwrap();
        }
        remove_orphans(parent.path());
        assert!(!of(u32::MAX).exists() && of(std::process::id()).exists());
    }

    #[test]
    fn files_come_and_go() {
        let mut files = InputFiles::new().unwrap();
        let x = spec("x", &[3, 5], DType::BF16);
        let theta = spec("theta", &[2, 4], DType::F32);
        let inputs = files.provide(&[x.clone(), theta]).unwrap();
        assert_eq!(fs::metadata(&inputs[0].path).unwrap().len(), 30);
        let all = |input: &Input| {
            let length = input.shape.iter().product();
            read(input, &[Sample { start: 0, length, step: 0, count: 1 }]).unwrap()
        };
        let theta = all(&inputs[1]);
        assert_eq!(theta[..4], theta[4..]);
        assert!(theta[0] == 1.0 && theta[3] < theta[2]);
        let first = all(&inputs[0]);
        assert!(first.iter().any(|&v| v > 0.0) && first.iter().any(|&v| v < 0.0));

        // A longer x has the same values from its beginning, and its file serves a shorter one.
        let longer = files.provide(&[spec("x", &[7, 5], DType::BF16)]).unwrap();
        assert_eq!(all(&longer[0])[..15], first);
        assert_eq!(fs::metadata(&longer[0].path).unwrap().len(), 70);
        let shorter = files.provide(slice::from_ref(&x)).unwrap();
        assert_eq!(all(&shorter[0]), first);
        // Until memory is short.
        assert_eq!((files.bytes(), files.bytes_with(slice::from_ref(&x))), (102, 102));
        files.shrink_to(&[x]);
        assert_eq!((all(&shorter[0]), files.bytes()), (first, 30));
        assert_eq!(fs::metadata(&shorter[0].path).unwrap().len(), 30);
        assert!(!inputs[1].path.exists());
        let folder = files.folder().to_path_buf();
        drop(files);
        assert!(!folder.exists());
    }

    #[test]
    fn long_tensors_repeat() {
        let mut files = InputFiles {
            folder: tempfile::tempdir().unwrap().keep(),
            blocks: HashMap::new(),
            files: HashMap::new(),
        };
        let inputs = files.provide(&[spec("grad", &[PERIOD + 2], DType::F16)]).unwrap();
        // The same if it grows.
        let grown = files.provide(&[spec("grad", &[2 * PERIOD + 5], DType::F16)]).unwrap();
        for (input, length, count) in [(&inputs[0], 2, 2), (&grown[0], 5, 3)] {
            let sample = Sample { start: 0, length, step: PERIOD, count };
            let ends = read(input, &[sample]).unwrap();
            assert!(ends.chunks(length).all(|part| part == &ends[..length]));
        }
    }
}
