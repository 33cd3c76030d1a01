//! NVIDIA's run-time compiler, which needs no GPU: whether it takes the kernels, and how many
//! registers they use.

use std::ffi::{CStr, CString, OsString, c_char, c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering};

use libloading::Library;

use super::Source;

/// The variable that names the folder of the compiler's library.
pub const VARIABLE: &str = "FUSELANE_NVRTC";
/// The variable that names the folder of CUDA's header files.
pub const INCLUDE_VARIABLE: &str = "FUSELANE_CUDA_INCLUDE";

/// Names of the library, newest last: an older one can be loaded by more drivers.
const NAMES: &[&str] = if cfg!(windows) {
    &["nvrtc64_120_0.dll", "nvrtc64_130_0.dll"]
} else {
    &["libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so"]
};

/// What went wrong, and what helps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault(String);

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Fault {}

/// What the compiler has made of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// The program in PTX.
    pub ptx: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes that a thread writes to local memory because registers do not suffice.
    pub spill_stores: u32,
    /// Bytes that it reads from there.
    pub spill_loads: u32,
    /// Bytes of local memory, be it for spills or for arrays that are indexed.
    pub stack: u32,
    /// Bits of the widest load from global memory.
    pub widest_load: u32,
}

type Program = *mut c_void;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Text = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;
type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;

/// The compiler.
pub struct Nvrtc {
    create: Create,
    compile: Compile,
    log: (Size, Text),
    ptx: (Size, Text),
    destroy: Destroy,
    /// As in (12, 9).
    version: (u32, u32),
    include: PathBuf,
    /// The functions above are its own.
    _library: Library,
}

impl Nvrtc {
    /// Loads the library: from the folder that `FUSELANE_NVRTC` names, or else from where the
    /// system looks for libraries, or else from the Python package `nvidia-cuda-nvrtc-cu12`. The
    /// header files are looked for in `FUSELANE_CUDA_INCLUDE`, beside the library and where CUDA
    /// is installed.
    pub fn load() -> Result<Self, Fault> {
        let folder = std::env::var_os(VARIABLE).map(PathBuf::from);
        let mut paths = Vec::new();
        if let Some(folder) = &folder {
            paths.extend(NAMES.iter().map(|name| folder.join(name)));
        } else {
            paths.extend(NAMES.iter().map(PathBuf::from));
            if let Some(packages) = python_packages() {
                let folder = packages.join("cuda_nvrtc/lib");
                paths.extend(NAMES.iter().map(|name| folder.join(name)));
            }
        }
        let found = paths.iter().find_map(|path| {
            // SAFETY: NVIDIA's library runs nothing of consequence when it is loaded.
            unsafe { Library::new(path) }.ok().map(|library| (library, path))
        });
        let Some((library, path)) = found else {
            let place = match folder {
                Some(folder) => format!("in {} ({VARIABLE})", folder.display()),
                None => format!("on this machine; {VARIABLE} names its folder"),
            };
            return Err(Fault(format!(
                "there is no NVRTC {place}. \
                 `pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12` installs it"
            )));
        };
        let include = include(path)?;
        let missing = |error| Fault(format!("{} is no NVRTC: {error}", path.display()));
        let library_ref = &library;
        // SAFETY: these are the signatures in `nvrtc.h`.
        unsafe {
            let create = *library_ref.get::<Create>(b"nvrtcCreateProgram\0").map_err(missing)?;
            let compile = *library_ref.get::<Compile>(b"nvrtcCompileProgram\0").map_err(missing)?;
            let size = |name: &[u8]| library_ref.get::<Size>(name).map(|size| *size);
            let text = |name: &[u8]| library_ref.get::<Text>(name).map(|text| *text);
            let log = (
                size(b"nvrtcGetProgramLogSize\0").map_err(missing)?,
                text(b"nvrtcGetProgramLog\0").map_err(missing)?,
            );
            let ptx = (
                size(b"nvrtcGetPTXSize\0").map_err(missing)?,
                text(b"nvrtcGetPTX\0").map_err(missing)?,
            );
            let destroy = *library_ref.get::<Destroy>(b"nvrtcDestroyProgram\0").map_err(missing)?;
            let ask = *library_ref.get::<Version>(b"nvrtcVersion\0").map_err(missing)?;
            let (mut major, mut minor) = (0, 0);
            ask(&mut major, &mut minor);
            let version = (major as u32, minor as u32);
            Ok(Self { create, compile, log, ptx, destroy, version, include, _library: library })
        }
    }

    /// The version, as in (12, 9).
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// Compiles a CUDA source for an architecture, as in `"sm_80"`, with the options of CubeCL's
    /// runtime.
    pub fn compile(&self, source: &str, architecture: &str) -> Result<Kernel, Fault> {
        let text = |text: String| CString::new(text).map_err(|_| Fault("a NUL in a text".into()));
        let source = text(source.to_owned())?;
        let options = [
            text(format!("--gpu-architecture={architecture}"))?,
            text(format!("--include-path={}", self.include.display()))?,
            text("-lineinfo".into())?,
            // This one is ours: it has the log tell the registers.
            text("--ptxas-options=-v".into())?,
        ];
        let mut program = Opened { program: null_mut(), destroy: self.destroy };
        // SAFETY: the source ends in NUL, and there are no headers.
        let code = unsafe {
            (self.create)(&mut program.program, source.as_ptr(), null(), 0, null(), null())
        };
        if code != 0 {
            return Err(Fault(format!("NVRTC has failed with code {code}")));
        }
        let pointers = options.each_ref().map(|option| option.as_ptr());
        // SAFETY: the program was created, and the options end in NUL.
        let code =
            unsafe { (self.compile)(program.program, pointers.len() as c_int, pointers.as_ptr()) };
        let log = read(self.log, &program)?;
        if code != 0 {
            return Err(Fault(format!("NVRTC refuses it for {architecture}:\n{}", log.trim_end())));
        }
        let ptx = read(self.ptx, &program)?;
        kernel(ptx, &log).ok_or_else(|| Fault(format!("NVRTC's log is not understood:\n{log}")))
    }
}

impl Nvrtc {
    /// Compiles each source for each architecture, on some threads at once.
    pub fn compile_all(
        &self,
        sources: &[Source],
        architectures: &[&str],
        threads: usize,
    ) -> Vec<Vec<Result<Kernel, Fault>>> {
        let next = AtomicUsize::new(0);
        let work = || {
            let mut done = Vec::new();
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                let Some(source) = sources.get(i) else { return done };
                let each = architectures.iter().map(|name| self.compile(&source.text, name));
                done.push((i, each.collect()));
            }
        };
        let mut done: Vec<(usize, Vec<_>)> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(work)).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().flat_map(join).collect()
        });
        done.sort_by_key(|&(i, _)| i);
        done.into_iter().map(|(_, results)| results).collect()
    }
}

/// A line for each kernel: registers, spills, bytes of local memory for each thread, and widest loads,
/// for each architecture.
pub fn table(
    sources: &[Source],
    architectures: &[&str],
    results: &[Vec<Result<Kernel, Fault>>],
) -> String {
    let mut lines = vec![["kernel-dtype-options", "cube", "shared"].map(str::to_owned).to_vec()];
    for name in architectures {
        lines[0].push(format!("{name}: registers"));
        lines[0].extend(["spills", "local", "load"].map(str::to_owned));
    }
    for (source, results) in sources.iter().zip(results) {
        let [x, y, z] = source.cube;
        let cube = if z > 1 { format!("{x} x {y} x {z}") } else { format!("{x} x {y}") };
        let mut line = vec![source.name.clone(), cube, source.shared.to_string()];
        for result in results {
            match result {
                Ok(kernel) => line.extend([
                    kernel.registers.to_string(),
                    (kernel.spill_stores + kernel.spill_loads).to_string(),
                    format!("{} bytes", kernel.stack),
                    format!("{} bits", kernel.widest_load),
                ]),
                Err(_) => line.extend(["failed", "", "", ""].map(str::to_owned)),
            }
        }
        lines.push(line);
    }
    let columns = lines[0].len();
    let width = |i: usize| lines.iter().map(|line| line[i].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for line in &lines {
        let cells = line.iter().zip(&widths).enumerate().map(|(i, (cell, &width))| {
            if i == 0 { format!("{cell:width$}") } else { format!("{cell:>width$}") }
        });
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

/// A program that goes away.
struct Opened {
    program: Program,
    destroy: Destroy,
}

impl Drop for Opened {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: it was created, and nobody uses it any more.
            unsafe { (self.destroy)(&mut self.program) };
        }
    }
}

fn read((size, text): (Size, Text), program: &Opened) -> Result<String, Fault> {
    let mut len = 0;
    // SAFETY: the program was created.
    let mut code = unsafe { size(program.program, &mut len) };
    let mut bytes = vec![0u8; len.max(1)];
    if code == 0 && len > 0 {
        // SAFETY: the buffer is as long as was asked for, the NUL included.
        code = unsafe { text(program.program, bytes.as_mut_ptr().cast()) };
    }
    if code != 0 {
        return Err(Fault(format!("NVRTC has failed with code {code}")));
    }
    let text = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

/// The folder with `cuda_bf16.h` for a library.
fn include(library: &Path) -> Result<PathBuf, Fault> {
    let mut folders = Vec::new();
    folders.extend(std::env::var_os(INCLUDE_VARIABLE).map(PathBuf::from));
    if let Some(above) = library.parent().and_then(Path::parent) {
        // A toolkit, and the Python packages.
        folders.push(above.join("include"));
        folders.extend(above.parent().map(|above| above.join("cuda_runtime/include")));
    }
    let toolkit =
        std::env::var_os("CUDA_PATH").unwrap_or_else(|| OsString::from("/usr/local/cuda"));
    folders.push(Path::new(&toolkit).join("include"));
    folders.push(PathBuf::from("/usr/include"));
    folders.extend(python_packages().map(|packages| packages.join("cuda_runtime/include")));
    let found = folders.into_iter().find(|folder| folder.join("cuda_bf16.h").is_file());
    found.ok_or_else(|| {
        Fault(format!(
            "CUDA's header files are not found; {INCLUDE_VARIABLE} names their folder. \
             `pip install nvidia-cuda-runtime-cu12` installs them"
        ))
    })
}

/// The folder of NVIDIA's Python packages.
fn python_packages() -> Option<PathBuf> {
    let code = "import nvidia; print(list(nvidia.__path__)[0])";
    let mut python = Command::new("python3");
    let output = python.args(["-c", code]).stdin(Stdio::null()).stderr(Stdio::null()).output();
    let output = output.ok().filter(|output| output.status.success())?;
    Some(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()))
}

/// Reads the log of a compilation.
fn kernel(ptx: String, log: &str) -> Option<Kernel> {
    let before = |words: &str| -> Option<u32> {
        let at = log.find(words)?;
        log[..at].split_whitespace().next_back()?.parse().ok()
    };
    Some(Kernel {
        registers: before(" registers")?,
        spill_stores: before(" bytes spill stores")?,
        spill_loads: before(" bytes spill loads")?,
        stack: before(" bytes stack frame")?,
        widest_load: widest(&ptx, "ld.global"),
        ptx,
    })
}

/// The bits of the widest access of a kind, as in `ld.global.nc.v4.u32`.
fn widest(ptx: &str, access: &str) -> u32 {
    let words = ptx.split_whitespace().filter(|word| word.starts_with(access));
    let bits = words.map(|word| {
        let parts = word.split('.');
        let number = |part: &str, letters: &[char]| {
            part.strip_prefix(letters).and_then(|digits| digits.parse::<u32>().ok())
        };
        let vector = parts.clone().find_map(|part| number(part, &['v'])).unwrap_or(1);
        let bits = parts.clone().next_back().and_then(|part| number(part, &['b', 'u', 's', 'f']));
        vector * bits.unwrap_or(0)
    });
    bits.max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_are_read() {
        let ptx = "ld.global.f32 %f1, [%rd1];\n\tld.global.nc.v4.u32 \t{%r1}, [%rd4];\n\
                   st.global.v2.b16 [%rd2], {%rs1}; ld.param.u64 %rd3, [k];";
        assert_eq!(widest(ptx, "ld.global"), 128);
        assert_eq!(widest(ptx, "st.global"), 32);
        assert_eq!(widest("", "ld.global"), 0);
    }

    #[test]
    fn the_log_is_read() {
        let log = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'k' for 'sm_80'\n\
            ptxas info    : Function properties for k\n\
            ptxas         .     16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n\
            ptxas info    : Used 12 registers, used 0 barriers, 360 bytes cmem[0]\n";
        let kernel = kernel(String::new(), log).unwrap();
        assert_eq!((kernel.registers, kernel.stack), (12, 16));
        assert_eq!((kernel.spill_stores, kernel.spill_loads), (4, 8));
    }
}
