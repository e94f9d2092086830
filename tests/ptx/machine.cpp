// Runs the programs of a launch, one after the other, thread by thread, and watches every access.
//
// `machine.py` compiles this file, hands over instructions and memory, and words the findings. Chapters are those of
// the PTX ISA. A register is a word of 64 bits of which an instruction takes the low ones that its type has; a constant
// and a special register are registers too, filled when a program begins.

#include <random>
#include <vector>

#include "opcodes.hpp"

constexpr int LANES = 32;
constexpr uint32_t EVERY_LANE = 0xFFFFFFFF;

// --- memory with a record of who touched it ---

// Launch, program, epoch (barriers that the program has passed) and thread in one number; 0 is nobody.
constexpr int EPOCH = 10, PROGRAM = 27, LAUNCH = 49;

// Nothing stands between two accesses of one launch by two programs, or by two threads of a program in one epoch.
bool races(Word before, Word now) {
    Word apart = before ^ now;
    return before && apart && !(apart >> LAUNCH) && (apart >> PROGRAM || !(apart >> EPOCH));
}

// The last thread that touched a place, another of its epoch, and one of an earlier program: programs come one by one.
struct Touched {
    Word own, other, elsewhere;
    void note(Word now) {
        if ((own ^ now) >> PROGRAM) elsewhere = own;
        if ((own ^ now) >> EPOCH) own = other = now;
        if (own != now) other = own, own = now;
    }
    Word racing(Word now) const { return races(own, now) ? own : races(other, now) ? other : races(elsewhere, now) ? elsewhere : 0; }
};

// Of an element of a tensor, or of a few bytes of shared memory.
struct Cell {
    Word wrote;
    Touched reads, atomics;
};

enum Kind { TENSOR, SHARED, LOCAL };
// A generic address that begins here is one of local memory.
constexpr Word LOCAL_BASE = Word(1) << 60;

struct Region {
    uint8_t* data;
    int64_t base, size, item;
    int64_t fresh;  // nobody has put values there before the first launch
    Cell* cells;    // null: nothing is recorded
    int64_t axes, shape[4], strides[4];

    // Between the elements of a tensor that is not contiguous lies somebody else's memory.
    bool is_gap(int64_t element) const {
        for (int i = 0; i < axes; i++) {  // by falling stride
            int64_t index = std::min(strides[i] ? element / strides[i] : 0, shape[i] - 1);
            element -= index * strides[i];
        }
        return axes && element != 0;
    }
};

enum Finds { BOUNDS, ALIGNMENT, UNWRITTEN, RACE_IN_A_PROGRAM, RACE_OF_PROGRAMS, DIVERGENCE };

struct Finding {
    int64_t kind, instruction, program, thread, threads, region, place, other;
};

// --- programs ---

enum Action { COMPUTE, SETP, PACK, UNPACK, LOAD, STORE, ATOMIC, MATRIX, SHUFFLE, BALLOT, REDUCE, BARRIER, BRANCH, INDEXED, EXIT };
enum Mode { BFLY, DOWN, UP, IDX };

struct Instruction {
    Compute compute;
    int64_t place;  // what is added to an address
    int32_t action, guard, negated, flush_from, flush_to;
    int32_t space, width, is_signed, mode, target, to_count, from_count;
    int32_t to[9], from[9];
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
    int64_t local;                           // bytes of a thread
    int64_t launch, seed;
};

Word flushed(Word word) {  // a subnormal float32 is a zero of its sign
    return (word & 0x7F800000) == 0 ? word & 0x80000000 : word;
}

struct Warp {
    std::vector<Word> registers;
    int32_t at[LANES];
    int first;  // thread
    bool waits;
};

class Program {
   public:
    explicit Program(Task& task) : task(task), random(task.seed) {
        for (int i = 0; i < task.threads / LANES; i++) warps.push_back({std::vector<Word>(), {}, i * LANES, false});
    }

    void run(int64_t number) {
        program = number, epoch = 0;
        Region& shared = task.regions[task.tensors];
        if (shared.cells) std::fill_n(shared.cells, shared.size / shared.item, Cell{});
        for (Warp& warp : warps) {
            warp.registers.resize(task.registers * LANES);
            for (int64_t i = 0; i < task.registers; i++)
                std::fill_n(&warp.registers[i * LANES], LANES, task.initial[i]);
            for (int i = 0; i < LANES; i++) {
                warp.registers[task.thread * LANES + i] = warp.first + i;
                warp.registers[task.program * LANES + i] = number;
                warp.registers[task.lane * LANES + i] = i;
                warp.at[i] = 0;
            }
            warp.waits = false;
        }
        std::vector<Warp*> order;
        for (Warp& warp : warps) order.push_back(&warp);
        for (;;) {  // one epoch, in a new order of the warps
            std::shuffle(order.begin(), order.end(), random);
            for (Warp* warp : order) run_warp(*warp);
            const int here = waiting_at();
            if (here < 0) return;
            for (Warp& warp : warps)
                if (warp.waits) {
                    warp.waits = false;
                    for (int& at : warp.at) at++;
                }
            if (++epoch >= 1 << (PROGRAM - EPOCH)) std::abort();
        }
    }

   private:
    Task& task;
    std::mt19937_64 random;
    std::vector<Warp> warps;
    int64_t program = 0, epoch = 0;

    Word stamp(int thread) const { return Word(task.launch) << LAUNCH | Word(program) << PROGRAM | Word(epoch) << EPOCH | thread; }

    void report(Finds kind, const Instruction& x, int thread, int64_t region, int64_t place, int64_t other = 0) {
        const int64_t number = &x - task.code;
        for (int64_t i = 0; i < task.found; i++)
            if (task.findings[i].kind == kind && task.findings[i].instruction == number) {
                task.findings[i].threads += task.findings[i].program == program;
                return;
            }
        if (task.found < task.capacity) task.findings[task.found++] = {kind, number, program, thread, 1, region, place, other};
    }

    // Find the barrier at which every warp waits; -1 at the end. Who waits for a warp that will not come is reported.
    int waiting_at() {
        int here = -1;
        bool all = true;
        for (Warp& warp : warps) here = warp.waits && here < 0 ? warp.at[0] : here;
        for (Warp& warp : warps) all &= warp.waits && warp.at[0] == here;
        if (here < 0 || all) return here;
        for (Warp& warp : warps)
            if (!warp.waits || warp.at[0] != here) report(DIVERGENCE, task.code[here], warps[0].first, -1, warp.at[0]);
        return -1;
    }

    // Run a warp to its end or to a barrier. Of threads that have parted those that are behind go first, so that they
    // meet the others again; for an exchange or a barrier all of a warp have to come.
    void run_warp(Warp& warp) {
        const int end = int(task.instructions);
        while (!warp.waits) {
            int here = end, waiting = end;
            const bool together = std::all_of(warp.at, warp.at + LANES, [&](int at) { return at == warp.at[0]; });
            for (int at : warp.at) {
                const bool stays = !together && at < end && is_of_warp(task.code[at]);
                (stays ? waiting : here) = std::min(stays ? waiting : here, at);
            }
            if (here == end) {
                if (waiting == end) return;
                int other = end;
                for (int at : warp.at) other = at != waiting ? at : other;
                for (int i = 0; i < LANES; i++)
                    if (warp.at[i] == waiting) report(DIVERGENCE, task.code[waiting], warp.first + i, -1, other);
                std::fill_n(warp.at, LANES, end);
                return;
            }
            uint32_t mask = 0;
            int meet = end;
            for (int i = 0; i < LANES; i++) {
                mask |= uint32_t(warp.at[i] == here) << i;
                if (warp.at[i] > here) meet = std::min(meet, warp.at[i]);
            }
            run_lanes(warp, mask, here, meet);
        }
    }

    static bool is_of_warp(const Instruction& x) { return x.action >= MATRIX && x.action <= BARRIER; }

    // Run threads of a warp that are at one instruction until they branch, meet others or have to wait.
    void run_lanes(Warp& warp, uint32_t mask, int here, int meet) {
        for (int next = here;; next++) {
            const Instruction& x = task.code[next];
            auto stay = [&](int at) {
                for (int i = 0; i < LANES; i++)
                    if (mask >> i & 1) warp.at[i] = at;
            };
            if (next >= meet || (is_of_warp(x) && mask != EVERY_LANE)) return stay(next);
            uint32_t active = mask;
            if (x.guard >= 0) {
                const Word* holds = &warp.registers[x.guard * LANES];
                for (int i = 0; i < LANES; i++)
                    if ((holds[i] & 1) == Word(x.negated)) active &= ~(1u << i);
            }
            if (x.action == BARRIER) {
                task.executed[next] += LANES;
                warp.waits = true;
                return stay(next);
            }
            task.executed[next] += __builtin_popcount(mask);
            if (x.action >= BRANCH) {
                stay(next + 1);
                for (int i = 0; i < LANES; i++)
                    if (active >> i & 1) warp.at[i] = x.action == EXIT ? int(task.instructions)
                        : x.action == BRANCH ? x.target : task.targets[x.target + warp.registers[x.from[0] * LANES + i]];
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
            const Word* members = x.action == MATRIX ? nullptr : from(x.from_count - 1);
            each([&](int i) {
                if (active != EVERY_LANE || (members && uint32_t(members[i]) != EVERY_LANE))
                    report(DIVERGENCE, x, warp.first + i, -1, &x - task.code);
            });
        }
        switch (x.action) {
            case COMPUTE:
            case SETP: {
                Word *a = from(0), *b = from(1), *c = from(2), *out = to(0);
                each([&](int i) {
                    Word found = x.flush_from ? x.compute(flushed(a[i]), flushed(b[i]), flushed(c[i])) : x.compute(a[i], b[i], c[i]);
                    if (x.action == COMPUTE) out[i] = x.flush_to ? flushed(found) : found;
                    else if (x.width == 2) {  // of pairs
                        Word high = x.compute(a[i] >> 16, b[i] >> 16, 0);
                        to(1)[i] = high & 1, out[i] = found & 1;
                    } else {
                        if (x.to_count > 1) to(1)[i] = found >> 1 & 1;
                        out[i] = found & 1;
                    }
                });
                break;
            }
            case PACK:
                each([&](int i) {
                    Word whole = 0;
                    for (int j = 0; j < x.from_count; j++)
                        whole |= (from(j)[i] & low(x.width)) << 8 * x.width * j;
                    to(0)[i] = whole;
                });
                break;
            case UNPACK:
                each([&](int i) {
                    Word whole = from(0)[i];
                    for (int j = 0; j < x.to_count; j++) to(j)[i] = whole >> 8 * x.width * j & low(x.width);
                });
                break;
            case LOAD:
            case STORE:
            case ATOMIC: access(warp, x, active); break;
            case MATRIX: load_matrix(warp, x); break;
            case SHUFFLE: shuffle(from(0), from(1), from(2), x, to(0)); break;
            case BALLOT: {
                Word votes = 0;
                for (int i = 0; i < LANES; i++) votes |= ((from(0)[i] & 1) ^ Word(x.mode)) << i;
                std::fill_n(to(0), LANES, votes);
                break;
            }
            case REDUCE: {
                Word all = from(0)[0];
                for (int i = 1; i < LANES; i++) all = x.compute(all, from(0)[i], 0);
                std::fill_n(to(0), LANES, all);
            }
        }
    }

    static Word low(int width) { return width == 8 ? ~Word(0) : (Word(1) << 8 * width) - 1; }

    // 9.7.9.6: whose value each thread gets, as the ISA's pseudo-code has it.
    static void shuffle(const Word* value, const Word* by, const Word* limit, const Instruction& x, Word* out) {
        Word found[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            int clamp = limit[lane] & 31, segment = limit[lane] >> 8 & 31, b = by[lane] & 31;
            int highest = (lane & segment) | (clamp & ~segment & 31);
            int source = x.mode == BFLY ? lane ^ b : x.mode == DOWN ? lane + b : x.mode == UP ? lane - b
                : (lane & segment) | (b & ~segment & 31);
            bool good = x.mode == UP ? source >= highest : source <= highest;
            found[lane] = value[good ? source : lane];
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
        const bool local = x.space == LOCAL || (x.space == TENSOR && address >= LOCAL_BASE);
        if (local || x.space == SHARED) {
            Region* region = task.regions + task.tensors + local;
            at = int64_t(address & ~LOCAL_BASE);
            if (at + size > (local ? task.local : region->size)) {
                report(BOUNDS, x, thread, region - task.regions, at);
                return nullptr;
            }
            at += local ? thread * task.local : 0;
            return region;
        }
        auto inside = [&](const Region* r) { return int64_t(address) >= r->base && int64_t(address) + size <= r->base + r->size; };
        for (Region* r = task.regions; !(hint && inside(hint)) && r < task.regions + task.tensors; r++)
            if (inside(r)) hint = r;
        if (!hint || !inside(hint)) {
            report(BOUNDS, x, thread, -1, int64_t(address));
            return nullptr;
        }
        at = int64_t(address) - hint->base;
        return hint;
    }

    // Check and record an access of one thread; new_bytes is what a store writes.
    void watch(const Instruction& x, Region& r, int64_t at, int size, int thread, const uint8_t* new_bytes) {
        if (!r.cells) return;
        const Word now = stamp(thread);
        const int64_t region = &r - task.regions;
        for (int64_t i = at / r.item; i <= (at + size - 1) / r.item; i++) {
            Cell& cell = r.cells[i];
            if (r.is_gap(i)) report(BOUNDS, x, thread, region, at);
            if (x.action != STORE && r.fresh && !cell.wrote) report(UNWRITTEN, x, thread, region, i * r.item);
            Word other = races(cell.wrote, now) ? cell.wrote : 0;
            // Triton's layouts repeat values: that threads of one program write one value to one place is no race.
            if (x.action == STORE && other && !((other ^ now) >> PROGRAM)) {
                const int64_t first = std::max(at, i * r.item), last = std::min(at + size, (i + 1) * r.item);
                if (!memcmp(r.data + first, new_bytes + (first - at), last - first)) other = 0;
            }
            if (!other && (x.action == STORE || x.action == ATOMIC)) other = cell.reads.racing(now);
            if (!other && x.action != ATOMIC) other = cell.atomics.racing(now);
            if (other) report((other ^ now) >> PROGRAM ? RACE_OF_PROGRAMS : RACE_IN_A_PROGRAM, x, thread, region, i * r.item, int64_t(other));
            if (x.action == STORE) cell.wrote = now;
            else (x.action == ATOMIC ? cell.atomics : cell.reads).note(now);
        }
    }

    void access(Warp& warp, const Instruction& x, uint32_t active) {
        const int count = x.action == LOAD ? x.to_count : x.action == STORE ? x.from_count - 1 : 1, size = count * x.width;
        const Word* base = &warp.registers[x.from[0] * LANES];
        int64_t sectors[2 * LANES];
        int sector_count = 0, lanes = 0;
        Region* hint = nullptr;
        for (int i = 0; i < LANES; i++) {
            if (!(active >> i & 1)) continue;
            Word address = (x.space == SHARED ? Word(uint32_t(base[i])) : base[i]) + Word(x.place);
            int64_t at;
            lanes++;
            sectors[sector_count++] = int64_t(address >> 5), sectors[sector_count++] = int64_t((address + size - 1) >> 5);
            Region* r = place_of(x, address, size, warp.first + i, at, hint);
            uint8_t data[64] = {};
            auto value = [&](int j) { return &warp.registers[x.from[j] * LANES + i]; };
            if (x.action == STORE)
                for (int j = 0; j < count; j++) memcpy(data + j * x.width, value(j + 1), x.width);
            if (r) {
                watch(x, *r, at, size, warp.first + i, data);
                if (x.action == STORE) memcpy(r->data + at, data, size);
                else memcpy(data, r->data + at, size);
            }
            if (x.action == STORE) continue;
            for (int j = 0; j < x.to_count; j++) {
                Word word = 0;
                memcpy(&word, data + j * x.width, x.width);
                if (x.is_signed) word = Word(int64_t(word << (64 - 8 * x.width)) >> (64 - 8 * x.width));
                if (x.action == ATOMIC && r) {
                    Word now = x.compute(word, *value(1), x.from_count > 2 ? *value(2) : 0);
                    memcpy(r->data + at, &now, x.width);
                }
                warp.registers[x.to[j] * LANES + i] = word;
            }
        }
        const int writes = x.action != LOAD;
        task.bytes[2 * x.space + writes] += uint64_t(lanes) * size;
        if (x.space == TENSOR) {
            std::sort(sectors, sectors + sector_count);
            task.bytes[6 + writes] += std::unique(sectors, sectors + sector_count) - sectors;
        }
    }

    // ldmatrix without .trans: thread i gets bytes 4 * (i % 4) of row i // 4 of each matrix; thread 8 m + j has the
    // address of row j of matrix m.
    void load_matrix(Warp& warp, const Instruction& x) {
        Word* base = &warp.registers[x.from[0] * LANES];
        Region* hint = nullptr;
        Word found[4][LANES] = {};
        for (int m = 0; m < x.to_count; m++)
            for (int i = 0; i < LANES; i++) {
                int64_t at;
                Region* r = place_of(x, uint32_t(base[8 * m + i / 4]) + Word(x.place), 16, warp.first + i, at, hint);
                if (!r) continue;
                watch(x, *r, at + 4 * (i % 4), 4, warp.first + i, nullptr);
                memcpy(&found[m][i], r->data + at + 4 * (i % 4), 4);
            }
        for (int m = 0; m < x.to_count; m++) std::copy_n(found[m], LANES, &warp.registers[x.to[m] * LANES]);
        task.bytes[2 * SHARED] += LANES * 4 * x.to_count;
    }
};

extern "C" {
Compute find(const char* opcode) {
    if (table.empty()) fill_table();
    auto entry = table.find(opcode);
    return entry == table.end() ? nullptr : entry->second;
}

Word compute(Compute function, Word a, Word b, Word c) { return function(a, b, c); }

void run(Task* task) {
    Program program(*task);
    for (int64_t i = 0; i < task->program_count; i++) program.run(task->programs[i]);
}
}
