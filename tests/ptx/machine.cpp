// Runs the programs of a launch, one after the other, thread by thread, and watches every access.
//
// machine.py compiles this file, hands over instructions and memory, and words the findings. Chapters are those of the
// PTX ISA. Constants and special registers are registers too, filled when a program begins.

#include <random>
#include <vector>

#include "opcodes.hpp"

constexpr int LANES = 32;
constexpr uint32_t EVERY_LANE = 0xFFFFFFFF;

// --- who touched which memory ---

// Launch, program, epoch (barriers that the program has passed) and thread in one number; 0 is nobody.
constexpr int EPOCH = 10, PROGRAM = 27, LAUNCH = 49;

int64_t program_of(Word stamp) { return stamp >> PROGRAM & ((1 << (LAUNCH - PROGRAM)) - 1); }
int64_t epoch_of(Word stamp) { return stamp >> EPOCH & ((1 << (PROGRAM - EPOCH)) - 1); }
int64_t thread_of(Word stamp) { return stamp & ((1 << EPOCH) - 1); }

// The last thread, another of its epoch, and one of an earlier program: programs come one by one.
struct Touched {
    Word own, other, elsewhere;
    void note(Word now) {
        if ((own ^ now) >> PROGRAM) elsewhere = own;
        if ((own ^ now) >> EPOCH) own = other = now;
        if (own != now) other = own, own = now;
    }
};

// The record of an element of a tensor, or of a few bytes of shared memory.
struct Cell {
    Word wrote;
    Touched reads, atomics;
};

enum Space { GLOBAL, SHARED };
constexpr Word LOCAL = Word(1) << 60;  // where a thread's local memory begins as a generic address

struct Region {
    uint8_t* data;
    int64_t base, size, item;
    int64_t fresh;  // nobody has put values there before the first launch
    Cell* cells;    // null: nothing is recorded
    int64_t axes, shape[4], strides[4];

    // Between the elements of a tensor that is not contiguous lies somebody else's memory.
    bool is_gap(int64_t element) const {
        for (int i = 0; i < axes; i++)  // by falling stride
            element -= std::min(strides[i] ? element / strides[i] : 0, shape[i] - 1) * strides[i];
        return axes && element != 0;
    }
};

enum Finds { BOUNDS, ALIGNMENT, UNWRITTEN, RACE_IN_A_PROGRAM, RACE_OF_PROGRAMS, DIVERGENCE, ENDLESS };

struct Finding {
    int64_t kind, instruction, program, thread, threads, region, place, other;
};

// --- programs ---

enum Action {
    COMPUTE, SETP, PACK, UNPACK, LOAD, STORE, ATOMIC,
    MATRIX, STORE_MATRIX, SHUFFLE, BALLOT, REDUCE, BARRIER,  // all threads of a warp together
    BRANCH, INDEXED, EXIT
};
enum Mode { BFLY, DOWN, UP, IDX };

struct Instruction {
    Compute compute;
    int64_t place;  // what is added to an address
    int32_t action, guard, negated, flush_from, flush_to, space, width, is_signed, mode, target, acquires, releases;
    int32_t to_count, from_count, to[9], from[9];
};

struct Task {
    const Instruction* code;
    const int32_t* targets;   // of brx.idx
    const Word* initial;      // of each register
    uint64_t* executed;       // by how many threads, of each instruction
    uint64_t* bytes;          // [space, read or written], then sectors of global memory
    const int64_t* programs;  // numbers of those that run
    Region* regions;          // tensors, then shared and local memory of one program
    Finding* findings;
    int64_t instructions, registers, program_count, tensors, found, capacity;
    int64_t threads, thread, program, lane;  // registers that hold %tid.x, %ctaid.x, %laneid
    int64_t launch, seed, most;  // steps of a program
    int64_t off_by, off_seed;  // of approximations, see opcodes.hpp
};

struct Warp {
    std::vector<Word> registers;
    int32_t at[LANES];
    int first;  // thread
    bool waits;
};

// A subnormal float32 is a zero of its sign.
Word flushed(Word word) { return word & 0x7F800000 ? word : word & 0x80000000; }

Word low(Word word, int width) { return width == 8 ? word : word & ((Word(1) << 8 * width) - 1); }

class Launch {
   public:
    explicit Launch(Task& task) : task(task), random(task.seed), warps(task.threads / LANES) {}

    void run(int64_t number) {
        program = number, epoch = 0, steps = 0;
        acquired.clear();
        Region& shared = task.regions[task.tensors];
        if (shared.cells) std::fill_n(shared.cells, shared.size / shared.item, Cell{});
        std::vector<Warp*> order;
        for (Warp& warp : warps) {
            begin(warp, int(&warp - &warps[0]) * LANES);
            order.push_back(&warp);
        }
        do {  // an epoch, in a new order of the warps
            std::shuffle(order.begin(), order.end(), random);
            for (Warp* warp : order) run_warp(*warp);
        } while (pass_barrier());
    }

   private:
    Task& task;
    std::mt19937_64 random;
    std::vector<Warp> warps;
    int64_t program = 0, epoch = 0, steps = 0;
    // What a counter hands on of the programs that released it, and what this program has acquired, and when: stamps.
    struct Known {
        Word released, acquired;
    };
    using Stamps = std::unordered_map<int64_t, Known>;
    std::unordered_map<Word, Stamps> handed_on;
    Stamps acquired;

    void begin(Warp& warp, int first) {
        warp.registers.resize(task.registers * LANES);
        for (int64_t i = 0; i < task.registers; i++) std::fill_n(&warp.registers[i * LANES], LANES, task.initial[i]);
        for (int i = 0; i < LANES; i++) {
            warp.registers[task.thread * LANES + i] = first + i;
            warp.registers[task.program * LANES + i] = program;
            warp.registers[task.lane * LANES + i] = i;
            warp.at[i] = 0;
        }
        warp.first = first, warp.waits = false;
    }

    void report(Finds kind, const Instruction& x, int thread, int64_t region, int64_t place, int64_t other = 0) {
        const int64_t number = &x - task.code;
        for (Finding* f = task.findings; f < task.findings + task.found; f++)
            if (f->kind == kind && f->instruction == number) {
                f->threads += f->program == program;
                return;
            }
        if (task.found < task.capacity)
            task.findings[task.found++] = {kind, number, program, thread, 1, region, place, other};
    }

    // Begin another epoch if every warp waits at one barrier. Who waits for a warp that will not come is reported.
    bool pass_barrier() {
        const Warp* first = nullptr;
        for (Warp& warp : warps) first = !first && warp.waits ? &warp : first;
        if (!first) return false;
        bool all = true;
        for (Warp& warp : warps)
            if (!warp.waits || warp.at[0] != first->at[0]) {
                report(DIVERGENCE, task.code[first->at[0]], first->first, -1, warp.at[0]);
                all = false;
            }
        for (Warp& warp : warps) {
            warp.waits = false;
            for (int& at : warp.at) at++;
        }
        if (++epoch == 1 << (PROGRAM - EPOCH)) std::abort();  // more than a stamp can count
        return all;
    }

    static bool is_of_warp(const Instruction& x) { return x.action >= MATRIX && x.action <= BARRIER; }

    // Run a warp to its end or to a barrier. Of threads that have parted those that are behind go first, so that they
    // meet the others again; for an exchange or a barrier all of a warp have to come.
    void run_warp(Warp& warp) {
        const int end = int(task.instructions);
        while (!warp.waits) {
            int here = end, waiting = end, meet = end;
            const bool together = std::all_of(warp.at, warp.at + LANES, [&](int at) { return at == warp.at[0]; });
            for (int at : warp.at) {
                int& least = !together && at < end && is_of_warp(task.code[at]) ? waiting : here;
                least = std::min(least, at);
            }
            if (here == end) {
                for (int i = 0; i < LANES && waiting < end; i++)
                    if (warp.at[i] != waiting) report(DIVERGENCE, task.code[waiting], warp.first + i, -1, warp.at[i]);
                std::fill_n(warp.at, LANES, end);
                return;
            }
            uint32_t mask = 0;
            for (int i = 0; i < LANES; i++) {
                mask |= uint32_t(warp.at[i] == here) << i;
                if (warp.at[i] > here) meet = std::min(meet, warp.at[i]);
            }
            run_lanes(warp, mask, here, meet);
        }
    }

    // Run threads of a warp that are at one instruction until they branch, meet others or have to wait.
    void run_lanes(Warp& warp, uint32_t mask, int here, int meet) {
        for (int next = here;; next++) {
            const Instruction& x = task.code[next];
            if (++steps > task.most) {
                report(ENDLESS, x, warp.first, -1, 0);
                std::fill_n(warp.at, LANES, int(task.instructions));
                return;
            }
            uint32_t active = mask;
            if (x.guard >= 0)
                for (int i = 0; i < LANES; i++)
                    if ((warp.registers[x.guard * LANES + i] & 1) == Word(x.negated)) active &= ~(1u << i);
            const bool stops = next >= meet || (is_of_warp(x) && mask != EVERY_LANE);
            if (!stops) task.executed[next] += __builtin_popcount(mask);
            if (stops || x.action == BARRIER || x.action >= BRANCH) {
                warp.waits = !stops && x.action == BARRIER;
                for (int i = 0; i < LANES; i++) {
                    if (!(mask >> i & 1)) continue;
                    const bool goes = active >> i & 1 && !stops;
                    warp.at[i] = stops || x.action == BARRIER ? next
                        : !goes ? next + 1
                        : x.action == EXIT ? int(task.instructions)
                        : x.action == BRANCH ? x.target
                        : task.targets[x.target + warp.registers[x.from[0] * LANES + i]];
                }
                return;
            }
            if (active) step(warp, x, active);
        }
    }

    void step(Warp& warp, const Instruction& x, uint32_t active) {
        auto from = [&](int i) { return &warp.registers[x.from[i] * LANES]; };
        auto to = [&](int i) { return &warp.registers[x.to[i] * LANES]; };
        auto each = [&](auto&& what) {
            for (int i = 0; i < LANES; i++)
                if (active >> i & 1) what(i);
        };
        if (is_of_warp(x)) {
            const Word* members = x.action <= STORE_MATRIX ? nullptr : from(x.from_count - 1);
            each([&](int i) {
                if (active != EVERY_LANE || (members && uint32_t(members[i]) != EVERY_LANE))
                    report(DIVERGENCE, x, warp.first + i, -1, &x - task.code);
            });
        }
        Word *a = from(0), *b = from(1), *c = from(2), *out = to(0);
        switch (x.action) {
            case COMPUTE:
                if (x.flush_from)
                    each([&](int i) { out[i] = x.compute(flushed(a[i]), flushed(b[i]), flushed(c[i])); });
                else
                    each([&](int i) { out[i] = x.compute(a[i], b[i], c[i]); });
                if (x.flush_to) each([&](int i) { out[i] = flushed(out[i]); });
                break;
            case SETP:  // of pairs, or the answer and its opposite
                each([&](int i) {
                    const Word one = x.flush_from ? flushed(a[i]) : a[i], two = x.flush_from ? flushed(b[i]) : b[i];
                    const Word found = x.compute(one, two, 0);
                    if (x.to_count > 1) to(1)[i] = x.width == 2 ? x.compute(a[i] >> 16, b[i] >> 16, 0) & 1 : found >> 1;
                    out[i] = found & 1;
                });
                break;
            case PACK:
                each([&](int i) {
                    Word whole = 0;
                    for (int j = 0; j < x.from_count; j++) whole |= low(from(j)[i], x.width) << 8 * x.width * j;
                    out[i] = whole;
                });
                break;
            case UNPACK:
                each([&](int i) {
                    const Word whole = a[i];
                    for (int j = 0; j < x.to_count; j++) to(j)[i] = low(whole >> 8 * x.width * j, x.width);
                });
                break;
            case MATRIX:
            case STORE_MATRIX: access_matrix(warp, x); break;
            case SHUFFLE: shuffle(a, b, c, x, out); break;
            case BALLOT: {
                Word votes = 0;
                for (int i = 0; i < LANES; i++) votes |= ((a[i] & 1) ^ Word(x.mode)) << i;
                std::fill_n(out, LANES, votes);
                break;
            }
            case REDUCE: {
                Word all = a[0];
                for (int i = 1; i < LANES; i++) all = x.compute(all, a[i], 0);
                std::fill_n(out, LANES, all);
                break;
            }
            default: access(warp, x, active);
        }
    }

    // 9.7.9.6: whose value each thread gets, as the ISA's pseudo-code has it.
    static void shuffle(const Word* value, const Word* by, const Word* limit, const Instruction& x, Word* out) {
        Word found[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            const int clamp = limit[lane] & 31, segment = limit[lane] >> 8 & 31, b = by[lane] & 31;
            const int highest = (lane & segment) | (clamp & ~segment & 31);
            const int source = x.mode == BFLY ? lane ^ b
                : x.mode == DOWN ? lane + b
                : x.mode == UP ? lane - b
                : (lane & segment) | (b & ~segment & 31);
            found[lane] = value[(x.mode == UP ? source >= highest : source <= highest) ? source : lane];
        }
        std::copy_n(found, LANES, out);
    }

    // --- 9.7.9.8 and on: accesses ---

    // Find where an address leads, or report that it leads nowhere.
    Region* place_of(const Instruction& x, Word address, int size, int thread, int64_t& at, Region*& hint) {
        if (address % size) {
            report(ALIGNMENT, x, thread, -1, int64_t(address), size);
            return nullptr;
        }
        const bool local = address >= LOCAL;
        if (local || x.space == SHARED) {
            Region* region = task.regions + task.tensors + local;
            at = int64_t(address & ~LOCAL);
            const bool good = at + size <= (local ? region->size / task.threads : region->size);
            if (!good) report(BOUNDS, x, thread, region - task.regions, at);
            at += local ? region->size / task.threads * thread : 0;
            return good ? region : nullptr;
        }
        auto leads_to = [&](const Region* r) {
            return r && int64_t(address) >= r->base && int64_t(address) + size <= r->base + r->size;
        };
        for (Region* r = task.regions; !leads_to(hint) && r < task.regions + task.tensors; r++) hint = r;
        if (!leads_to(hint)) {
            report(BOUNDS, x, thread, -1, int64_t(address));
            return nullptr;
        }
        at = int64_t(address) - hint->base;
        return hint;
    }

    // Tell whether nothing orders two accesses of one launch: by two threads in one epoch, or by two programs, unless
    // one released a counter afterwards that the other acquired before. A barrier hands both on to all of a program.
    bool races(Word before, Word now) const {
        const Word apart = before ^ now;
        if (!before || !apart || apart >> LAUNCH || (!(apart >> PROGRAM) && apart >> EPOCH)) return false;
        const auto found = acquired.find(program_of(before));
        if (!(apart >> PROGRAM) || found == acquired.end()) return true;
        auto is_before = [](Word x, Word y) {
            return epoch_of(x) < epoch_of(y) || (epoch_of(x) == epoch_of(y) && thread_of(x) == thread_of(y));
        };
        return !is_before(before, found->second.released) || !is_before(found->second.acquired, now);
    }

    Word racing(const Touched& touched, Word now) const {
        for (Word before : {touched.own, touched.other, touched.elsewhere})
            if (races(before, now)) return before;
        return 0;
    }

    // What an atomic that acquires takes over from its counter, and what one that releases hands on.
    void order(const Instruction& x, Word address, Word now) {
        Stamps& counter = handed_on[address];
        if (x.acquires)
            for (auto& [program, known] : counter) acquired[program] = {known.released, now};
        if (x.releases) {
            for (auto& [program, known] : acquired) counter[program] = known;
            counter[program] = {now, 0};
        }
    }

    // Check and record an access of one thread; given is what a store writes.
    void watch(const Instruction& x, Region& r, int64_t at, int size, int thread, const uint8_t* given) {
        if (!r.cells) return;
        const Word now = Word(task.launch) << LAUNCH | Word(program) << PROGRAM | Word(epoch) << EPOCH | thread;
        const bool stores = x.action == STORE || x.action == STORE_MATRIX;
        const int64_t region = &r - task.regions;
        for (int64_t i = at / r.item; i <= (at + size - 1) / r.item; i++) {
            Cell& cell = r.cells[i];
            if (r.is_gap(i)) report(BOUNDS, x, thread, region, at);
            if (!stores && r.fresh && !cell.wrote) report(UNWRITTEN, x, thread, region, i * r.item);
            Word other = races(cell.wrote, now) ? cell.wrote : 0;
            // Triton's layouts repeat values: that threads of one program write one value to one place is no race.
            const int64_t first = std::max(at, i * r.item), last = std::min(at + size, (i + 1) * r.item);
            if (stores && other && !((other ^ now) >> PROGRAM) &&
                !memcmp(r.data + first, given + (first - at), last - first))
                other = 0;
            if (!other && (stores || x.action == ATOMIC)) other = racing(cell.reads, now);
            if (!other && x.action != ATOMIC) other = racing(cell.atomics, now);
            if (other) {
                const Finds kind = (other ^ now) >> PROGRAM ? RACE_OF_PROGRAMS : RACE_IN_A_PROGRAM;
                report(kind, x, thread, region, i * r.item, int64_t(other));
            }
            if (stores) cell.wrote = now;
            else (x.action == ATOMIC ? cell.atomics : cell.reads).note(now);
        }
        if (x.action == ATOMIC) order(x, Word(r.base + at), now);
    }

    void access(Warp& warp, const Instruction& x, uint32_t active) {
        const int count = x.action == LOAD ? x.to_count : x.action == STORE ? x.from_count - 1 : 1;
        const int size = count * x.width, writes = x.action != LOAD;
        Word sectors[2 * LANES];
        int sector_count = 0;
        Region* hint = nullptr;
        for (int i = 0; i < LANES; i++) {
            if (!(active >> i & 1)) continue;
            auto value = [&](int j) -> Word& { return warp.registers[x.from[j] * LANES + i]; };
            const Word address = (x.space == SHARED ? uint32_t(value(0)) : value(0)) + Word(x.place);
            for (Word last : {address, address + size - 1}) sectors[sector_count++] = last >> 5;
            int64_t at;
            uint8_t data[64] = {};
            for (int j = 0; x.action == STORE && j < count; j++) memcpy(data + j * x.width, &value(j + 1), x.width);
            if (Region* r = place_of(x, address, size, warp.first + i, at, hint)) {
                watch(x, *r, at, size, warp.first + i, data);
                if (x.action != STORE) memcpy(data, r->data + at, size);
                Word old = 0;
                memcpy(&old, data, x.width);
                const Word changed = x.action == ATOMIC ? x.compute(old, value(1), x.from_count > 2 ? value(2) : 0) : 0;
                if (writes) memcpy(r->data + at, x.action == ATOMIC ? (const uint8_t*)&changed : data, size);
            }
            for (int j = 0; j < x.to_count; j++) {
                Word word = 0;
                memcpy(&word, data + j * x.width, x.width);
                const int unused = x.is_signed ? 64 - 8 * x.width : 0;
                warp.registers[x.to[j] * LANES + i] = Word(int64_t(word << unused) >> unused);
            }
        }
        task.bytes[2 * x.space + writes] += sector_count / 2 * uint64_t(size);
        std::sort(sectors, sectors + sector_count);
        if (x.space == GLOBAL) task.bytes[4 + writes] += std::unique(sectors, sectors + sector_count) - sectors;
    }

    // ldmatrix and stmatrix without .trans: thread i has bytes 4 * (i % 4) of row i // 4 of each matrix; thread 8 m + j
    // has the address of row j of matrix m.
    void access_matrix(Warp& warp, const Instruction& x) {
        const std::vector<Word> base(&warp.registers[x.from[0] * LANES], &warp.registers[(x.from[0] + 1) * LANES]);
        const bool stores = x.action == STORE_MATRIX;
        const int count = stores ? x.from_count - 1 : x.to_count;
        Region* hint = nullptr;
        for (int m = 0; m < count; m++)
            for (int i = 0; i < LANES; i++) {
                int64_t at;
                const int thread = warp.first + i, part = 4 * (i % 4);
                Region* r = place_of(x, uint32_t(base[8 * m + i / 4]) + Word(x.place), 16, thread, at, hint);
                if (!r) continue;
                Word& word = warp.registers[(stores ? x.from[m + 1] : x.to[m]) * LANES + i];
                watch(x, *r, at + part, 4, thread, (const uint8_t*)&word);
                if (stores) memcpy(r->data + at + part, &word, 4);
                else memcpy(&word, r->data + at + part, 4);
            }
        task.bytes[2 * SHARED + stores] += LANES * 4 * count;
    }
};

extern "C" {
Compute find(const char* opcode) {
    if (table.empty()) fill_table();
    const auto entry = table.find(opcode);
    return entry == table.end() ? nullptr : entry->second;
}

Word compute(Compute function, Word a, Word b, Word c) { return function(a, b, c); }

void run(Task* task) {
    Launch launch(*task);
    off_by = task->off_by, off_seed = task->off_seed;
    for (int64_t i = 0; i < task->program_count; i++) launch.run(task->programs[i]);
    off_by = 0;
}
}
