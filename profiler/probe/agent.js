// Runs in the target, inside frida's agent. It prepares everything that a hook needs and changes no driver code by
// itself: the helper writes the five-byte jumps while all threads stand still (see tracing.py). Only when the helper
// is gone does this script take the jumps out again, one eight-byte store each.

// A hook's slot: a far jump to its wrapper, then, in one of the quick way, what counts a usual launch, then the function's
// relocated first instructions.
const SLOT = 96;
const QUICK_SLOT = 256;
const FAR_JUMP = 16; // bytes, filled up
const QUICK_FAR_JUMP = 48; // where it stands, so that what follows fills cache lines
const JUMP = 5;

const [ROLE, HIP] = [0, 5]; // bytes of layout.c's Entry
const GRAPH_LAUNCH = 1;
const RT_SIGACTION = 13;
const SIGRETURN = '48 c7 c0 0f 00 00 00 0f 05'; // mov rax, 15; syscall
const GLIBC_THREAD = 0x700; // bytes of a thread's own description that are looked through; it is larger in every release
const GLIBC_KEYS = 32; // keys whose values stand in there; those of as many others each stand in a block of their own

let module_ = null; // the compiled hooks
let inside = null;
let hooks = []; // {name, target, before, after, length}
let deleteKey = null;
let seen = null; // where the helper notes that it has seen that nobody is in the code
const slots = []; // [address, size] of the blocks of slots; memory of ours lives as long as something refers to it
let allocated = null;

function libc(name, result, args) {
  return new NativeFunction(Module.getGlobalExportByName(name), result, args);
}

function bytesOf(address, n) {
  return Array.from(new Uint8Array(address.readByteArray(n)));
}

function libraries(prefixes) {
  return Process.enumerateModules().filter((m) => prefixes.some((p) => m.name.startsWith(p)));
}

// The exports of `wanted` ([export, entry bytes, hot, name]) in the loaded libraries; one hook an address.
function find(prefixes, wanted) {
  const seen = new Set();
  const found = [];
  for (const library of libraries(prefixes)) {
    for (const [symbol, entry, hot, name] of wanted) {
      const target = library.findExportByName(symbol);
      if (target === null || seen.has(target.toString())) continue;
      seen.add(target.toString());
      found.push({ name, entry, hot, target, library });
    }
  }
  return found;
}

// Two sets of hooks on one function cannot be taken out in any order, so the second is refused.
function refuseHooked(found) {
  for (const { name, target } of found) {
    if (target.readU8() !== 0xe9) continue;
    const to = target.add(JUMP).add(target.add(1).readS32());
    if (Process.findModuleByAddress(to) === null) {
      throw new Error(`${name} is already hooked: by another profiler, or in the process that this one was forked from`);
    }
  }
}

function exported(prefixes, name) {
  for (const library of libraries(prefixes)) {
    const address = name === null ? null : library.findExportByName(name);
    if (address !== null) return address;
  }
  return NULL;
}

function hipMajor(prefixes, otherwise) {
  for (const library of libraries(prefixes)) {
    const version = /libamdhip64\.so\.(\d+)/.exec(library.path);
    if (version !== null) return Number(version[1]);
  }
  return otherwise;
}

function le(value, n) {
  let left = BigInt.asUintN(64, BigInt(value.toString()));
  return Array.from({ length: n }, () => {
    const byte = Number(left & 255n);
    left >>= 8n;
    return byte;
  });
}

// Where every thread keeps its value of `key`: {block, value, seq, number}. `value` and `seq` are offsets from the thread
// pointer or, where `block` is not 0, from what it points to at that offset; NULL in a thread that has no value there.
// `number` is the sequence number that says that the value is of this key. Found and tried out; null where the C library
// is another than glibc.
function threadLocal(key) {
  if (Module.findGlobalExportByName('gnu_get_libc_version') === null) return null;
  const thread = libc('pthread_self', 'pointer', [])();
  if (!thread.readPointer().equals(thread)) return null; // fs:0 holds its own address, by the ABI
  const set = libc('pthread_setspecific', 'int', ['uint', 'pointer']);
  const marks = [ptr('0x5afec0de12d687a1'), ptr('0x5afec0de98e7f3c2')];
  const places = marks.map((mark) => {
    set(key, mark);
    return key < GLIBC_KEYS ? nearPlaces(thread, mark) : farPlaces(thread, key, mark);
  });
  set(key, NULL);
  if (places.some((found) => found.length !== 1 || found[0].join() !== places[0][0].join())) return null;
  const [block, value] = places[0][0];
  const from = block === 0 ? thread : thread.add(block).readPointer();
  const number = from.add(value - 8).readU64();
  if (!from.add(value).readPointer().isNull() || number.compare(0) === 0 || number.compare(0x7fffffff) > 0) return null;
  return { block, value, seq: value - 8, number: number.toNumber() };
}

function nearPlaces(thread, mark) {
  const found = [];
  for (let at = 16; at < GLIBC_THREAD; at += 8) if (thread.add(at).readPointer().equals(mark)) found.push([0, at]);
  return found;
}

// The blocks' addresses stand behind the first of them, which is in the thread's description and is named as well.
function farPlaces(thread, key, mark) {
  const found = [];
  const first = 16 * GLIBC_KEYS;
  for (let table = 16 + first; table + 8 * GLIBC_KEYS <= GLIBC_THREAD; table += 8) {
    if (!thread.add(table).readPointer().equals(thread.add(table - first))) continue;
    const block = table + 8 * Math.floor(key / GLIBC_KEYS);
    const value = 16 * (key % GLIBC_KEYS) + 8;
    const at = block < GLIBC_THREAD ? thread.add(block).readPointer() : NULL;
    if (!at.isNull() && at.add(value).readPointer().equals(mark)) found.push([block, value]);
  }
  return found;
}

// Whether a call is among the instructions that move: it returns to where they are, and without a wrapper nobody would
// know that somebody is to come back there.
function callsFirst(target) {
  try {
    for (let at = target; at.sub(target).toInt32() < JUMP; ) {
      const instruction = Instruction.parse(at);
      if (instruction.groups.includes('call')) return true;
      at = instruction.next;
    }
    return false;
  } catch (error) {
    return true; // what cannot be read is not moved either
  }
}

// A launch outside of every capture, by a thread that has a slot, counted without a call, with its arguments where they
// are: no more than `launched` of rule.c does. Every other goes to the wrapper, one inside another hooked call to
// neither. Only rax, r10 and r11 are used, which no argument is in and which every function may change. The function
// itself is jumped to, not called: what it calls in turn is counted, so this is for CUDA, whose driver does not call its
// own exports from launches.
function quick(hook, index, local, arena, offsets) {
  const counter = arena.add(hook.entry[ROLE] === GRAPH_LAUNCH ? offsets.graphs : offsets.kernels);
  const code = [];
  const put = (...bytes) => code.push(...bytes);
  const back = (condition) => put(condition, 256 - (FAR_JUMP + code.length + 2)); // to the wrapper
  if (local.block === 0) {
    put(0x64, 0x4c, 0x8b, 0x1c, 0x25, ...le(local.value, 4)); // mov r11, fs:[value]
    put(0x64, 0x48, 0x81, 0x3c, 0x25, ...le(local.seq, 4), ...le(local.number, 4)); // cmp qword fs:[seq], number
    back(0x75); // jne
  } else {
    put(0x64, 0x4c, 0x8b, 0x1c, 0x25, ...le(local.block, 4)); // mov r11, fs:[block]
    put(0x4d, 0x85, 0xdb); // test r11, r11
    back(0x74); // jz
    put(0x49, 0x81, 0xbb, ...le(local.seq, 4), ...le(local.number, 4)); // cmp qword [seq], number
    back(0x75); // jne
    put(0x4d, 0x8b, 0x9b, ...le(local.value, 4)); // mov r11, [value]
  }
  put(0x4d, 0x85, 0xdb); // test r11, r11
  back(0x74); // jz: the first call of its thread
  put(0x49, 0xba, ...le(counter, 8)); // mov r10, counter
  put(0x49, 0x83, 0xba, ...le(arena.add(offsets.captures).sub(counter).toInt32(), 4), 0); // cmp qword [captures], 0
  back(0x7f); // jg: it may be recorded, not run
  put(0x49, 0x83, 0x7b, offsets.thread_depth, 0); // cmp qword [depth], 0
  const inner = put(0x75, 0) - 1; // jne, over what counts
  put(0x49, 0xff, 0x83, ...le(offsets.thread_calls + 8 * index, 4)); // inc qword [calls]
  put(0x31, 0xc0); // xor eax, eax
  put(0x49, 0x89, 0x43, offsets.thread_polls); // mov [polls], rax
  put(0x49, 0x89, 0x43, offsets.thread_pending); // mov [pending], rax
  put(0x49, 0xc7, 0x43, offsets.thread_broken_by, ...le(index + 1, 4)); // mov qword [broken_by], index + 1
  put(0xf0, 0x49, 0xff, 0x02); // lock inc qword [counter]
  code[inner] = code.length - inner - 1;
  return code;
}

function relocate(hook, at, room) {
  const writer = new X86Writer(at, { pc: at });
  const relocator = new X86Relocator(hook.target, writer);
  let n = 0;
  while (n < JUMP) {
    n = relocator.readOne();
    if (n === 0) return 0; // shorter than a jump: leave it alone
    if (relocator.eob && n < JUMP) return 0;
  }
  relocator.writeAll();
  if (!relocator.eoi) writer.putJmpAddress(hook.target.add(n));
  writer.flush();
  const used = writer.offset;
  writer.dispose();
  relocator.dispose();
  if (used > room) throw new Error(`${hook.name}: relocated code too long`);
  return n;
}

function compile(source, arena, found) {
  const wrappers = found.map((hook, i) => `${hook.hot ? 'LAUNCH' : 'CALL'}_WRAPPER(${i})`);
  const symbols = { arena };
  for (const name of ['pthread_getspecific', 'pthread_setspecific', 'clock_gettime', 'syscall', '__errno_location']) {
    symbols[name] = Module.getGlobalExportByName(name);
  }
  const built = new CModule(source + '\n' + wrappers.join('\n') + '\n', symbols);
  inside = new NativeFunction(built.probe_inside, 'int', []);
  return built;
}

function createKey() {
  const at = Memory.alloc(8);
  if (libc('pthread_key_create', 'int', ['pointer', 'pointer'])(at, NULL) !== 0) throw new Error('no pthread key left');
  const key = at.readU32();
  deleteKey = () => libc('pthread_key_delete', 'int', ['uint'])(key);
  return key;
}

function place(found, arena, offsets, local) {
  const blocks = new Map(); // one block of slots near each library
  const missing = [];
  const quicks = new Set(found.filter((h) => local !== null && h.hot && h.entry[HIP] === 0 && !callsFirst(h.target)));
  const isQuick = (hook) => quicks.has(hook);
  const sizeOf = (hook) => (isQuick(hook) ? QUICK_SLOT : SLOT); // the quick ones are the first of their library
  found.forEach((hook, i) => {
    let block = blocks.get(hook.library.base.toString());
    if (block === undefined) {
      const its = found.filter((other) => other.library.base.equals(hook.library.base));
      const needed = its.reduce((sum, other) => sum + sizeOf(other), 0);
      const size = (needed + Process.pageSize - 1) & ~(Process.pageSize - 1);
      const distance = 0x7fff0000 - hook.library.size;
      block = { at: Memory.alloc(size, { near: hook.target, maxDistance: distance }), size, used: 0 };
      Memory.protect(block.at, size, 'rwx');
      blocks.set(hook.library.base.toString(), block);
      slots.push([block.at, size]);
    }
    const slot = block.at.add(block.used);
    block.used += sizeOf(hook);
    const wrapped = slot.add(isQuick(hook) ? QUICK_FAR_JUMP : 0);
    wrapped.writeByteArray([0xff, 0x25, 0, 0, 0, 0]);
    wrapped.add(6).writePointer(module_[`w${i}`]);
    const counting = isQuick(hook) ? quick(hook, i, local, arena, offsets) : [];
    wrapped.add(FAR_JUMP).writeByteArray(counting);
    const original = wrapped.add(FAR_JUMP + counting.length);
    const enter = isQuick(hook) ? wrapped.add(FAR_JUMP) : wrapped;
    const length = relocate(hook, original, slot.add(sizeOf(hook)).sub(original).toInt32());
    const distance = enter.sub(hook.target.add(JUMP)).toInt32();
    if (length === 0 || !hook.target.add(JUMP).add(distance).equals(enter)) {
      missing.push(hook.name);
      return;
    }
    arena.add(offsets.original + 8 * i).writePointer(original);
    const relative = Memory.alloc(4);
    relative.writeS32(distance);
    const before = bytesOf(hook.target, JUMP);
    const after = [0xe9, ...bytesOf(relative, 4)];
    hooks.push({ name: hook.name, index: i, target: hook.target, before, after, length });
  });
  for (const block of blocks.values()) Memory.protect(block.at, block.size, 'r-x');
  return missing;
}

function ours(hook) {
  return bytesOf(hook.target, JUMP).every((byte, k) => byte === hook.after[k]);
}

// One eight-byte store each: a thread that runs into it sees the jump or the old code, never half of both.
function restore() {
  const word = Memory.alloc(8);
  for (const hook of hooks) {
    if (!ours(hook)) continue;
    Memory.protect(hook.target, 8, 'rwx');
    word.writeByteArray([...hook.before, ...bytesOf(hook.target.add(JUMP), 8 - JUMP)]);
    hook.target.writeU64(word.readU64());
    Memory.protect(hook.target, 8, 'r-x');
  }
}

function leave() {
  restore();
  const usleep = libc('usleep', 'int', ['uint']);
  for (let waited = 0; inside !== null && inside() > 0 && waited < 20000; waited++) usleep(1000);
  // Unless the helper has seen that nobody is in the code: what runs before a wrapper has said that it entered, or after it
  // has said that it left.
  if (seen !== null && seen.readU8() === 0) usleep(500000);
  if (deleteKey !== null) deleteKey();
  deleteKey = null;
}

// Where signal handlers of this process return to, those too that are installed later, through the C library.
function restorers() {
  const ask = libc('syscall', 'long', ['long', 'long', 'pointer', 'pointer', 'long']);
  const action = Memory.alloc(32); // handler, flags, restorer, mask
  const found = new Set();
  for (let signal = 1; signal <= 64; signal++) {
    if (Number(ask(RT_SIGACTION, signal, NULL, action, 8)) !== 0) continue;
    if (action.readU64().compare(1) > 0 && !action.add(16).readPointer().isNull()) found.add(action.add(16).readPointer().toString());
  }
  const itself = Process.findModuleByAddress(Module.getGlobalExportByName('sigaction'));
  for (const range of itself === null ? [] : itself.enumerateRanges('r-x')) {
    for (const { address } of Memory.scanSync(range.base, range.size, SIGRETURN)) found.add(address.toString());
  }
  return [...found];
}

function python(code) {
  const c = (name, result, args) => new NativeFunction(Module.getGlobalExportByName(name), result, args);
  if (Module.findGlobalExportByName('PyGILState_Ensure') === null) throw new Error('no Python in this process');
  if (c('Py_IsInitialized', 'int', [])() === 0) throw new Error('its Python is not running');
  const gil = c('PyGILState_Ensure', 'int', [])();
  try {
    const drop = c('Py_DecRef', 'void', ['pointer']);
    const names = c('PyDict_New', 'pointer', [])();
    const builtins = c('PyEval_GetBuiltins', 'pointer', [])();
    const set = c('PyDict_SetItemString', 'int', ['pointer', 'pointer', 'pointer']);
    set(names, Memory.allocUtf8String('__builtins__'), builtins);
    const run = c('PyRun_String', 'pointer', ['pointer', 'int', 'pointer', 'pointer']);
    const done = run(Memory.allocUtf8String(code), 257, names, names);
    if (done.isNull()) c('PyErr_Clear', 'void', [])();
    else drop(done);
    const answer = c('PyDict_GetItemString', 'pointer', ['pointer', 'pointer'])(names, Memory.allocUtf8String('answer'));
    const text = answer.isNull() ? NULL : c('PyUnicode_AsUTF8', 'pointer', ['pointer'])(answer);
    const result = text.isNull() ? null : text.readUtf8String();
    drop(names);
    return result;
  } finally {
    c('PyGILState_Release', 'void', ['int'])(gil);
  }
}

rpc.exports = {
  hasPython() {
    return Module.findGlobalExportByName('PyGILState_Ensure') !== null;
  },
  libraries(prefixes) {
    return libraries(prefixes).map((m) => m.path);
  },
  symbols(names) {
    const found = {};
    for (const name of names) {
      const at = Module.findGlobalExportByName(name);
      found[name] = at === null ? '0' : at.toString();
    }
    return found;
  },
  allocate(size) {
    allocated = Memory.alloc(size);
    return allocated.toString();
  },
  // Everything but the jumps themselves. Returns what the helper has to write, and where.
  prepare(request) {
    const arena = ptr(request.arena);
    const found = find(request.libraries, request.wanted).slice(0, request.max_entries);
    refuseHooked(found);
    const at = (name) => arena.add(request.offsets[name]);
    // An arena may be used again: threads get new slots under the new key, and no capture is known to be under way.
    libc('memset', 'pointer', ['pointer', 'int', 'size_t'])(at('threads'), 0, request.offsets.codes - request.offsets.threads);
    at('threads_used').writeS64(0);
    at('captures').writeS64(0);
    at('pid').writeS64(Process.id);
    const key = createKey();
    at('key').writeU64(key);
    at('is_capturing').writePointer(exported(request.libraries, request.is_capturing[0]));
    at('is_capturing_per_thread').writePointer(exported(request.libraries, request.is_capturing[1]));
    at('pointer_attribute').writePointer(exported(request.libraries, request.pointer_attribute));
    at('peek_error').writePointer(exported(request.libraries, request.peek_error));
    at('clear_error').writePointer(exported(request.libraries, request.clear_error));
    at('hip_major').writeS64(hipMajor(request.libraries, request.hip_major));
    found.forEach((hook, i) => at('entries').add(request.offsets.entry_size * i).writeByteArray(hook.entry));
    module_ = compile(request.source, arena, found);
    seen = Memory.alloc(8);
    const missing = place(found, arena, request.offsets, threadLocal(key));
    return {
      hooks: hooks.map((h) => [h.name, h.index, h.target.toString(), h.before, h.after, h.length]),
      names: found.map((h) => h.name),
      missing,
      seen: seen.toString(),
      code: [...slots, [module_.__start_text, module_.__stop_text.sub(module_.__start_text).toInt32()]].map(
        ([base, size]) => [base.toString(), size]
      ),
    };
  },
  callbacks() {
    const { probe_stack: stack, probe_inside: its, probe_waiter: waiter } = module_;
    return { stack: stack.toString(), inside: its.toString(), waiter: waiter.toString() };
  },
  inside() {
    return inside === null ? 0 : inside();
  },
  restorers,
  python,
  dispose: leave,
};
