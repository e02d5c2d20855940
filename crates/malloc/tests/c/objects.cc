// C++'s new and delete in all their forms.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <string>
#include <thread>
#include <vector>

struct alignas(256) Wide {
    char bytes[300];
};
struct Thrower {
    Thrower() { throw 1; }
    char bytes[100];
};

#define CHECK(what) ((what) ? (void)0 : (std::fprintf(stderr, "line %d: %s\n", __LINE__, #what), std::abort()))

int main(int count, char **) {
    if (count > 1) {
        static char not_new[64];
        char *volatile block = not_new + 16;
        std::printf("%p\n", static_cast<void *>(block)), std::fflush(stdout);
        delete block;
    }
    for (int i = 0; i < 1000; i++) {
        Wide *wide = new Wide, *many = new Wide[3];
        CHECK(reinterpret_cast<std::uintptr_t>(wide) % 256 == 0 && reinterpret_cast<std::uintptr_t>(many) % 256 == 0);
        delete wide;
        delete[] many;
        try {
            new Thrower;
        } catch (int) {
        }
    }
    volatile std::size_t huge = SIZE_MAX / 2;
    CHECK(new (std::nothrow) char[huge] == nullptr);
    bool thrown = false;
    try {
        ::operator new(huge);
    } catch (std::bad_alloc const &) {
        thrown = true;
    }
    CHECK(thrown);
    CHECK(new (std::align_val_t{4096}, std::nothrow) char[huge] == nullptr);
    thrown = false;
    try {
        ::operator new[](huge, std::align_val_t{4096});
    } catch (std::bad_alloc const &) {
        thrown = true;
    }
    CHECK(thrown);
    // What a handler frees is enough, or it says that there is no more.
    static int asked = 0;
    std::set_new_handler([] {
        if (++asked == 3) std::set_new_handler(nullptr);
    });
    CHECK(new (std::nothrow) char[huge] == nullptr && asked == 3);
    void *aligned = ::operator new(100, std::align_val_t{1024}, std::nothrow);
    CHECK(aligned && reinterpret_cast<std::uintptr_t>(aligned) % 1024 == 0);
    ::operator delete(aligned, std::align_val_t{1024}, std::nothrow);
    ::operator delete[](::operator new[](70), std::size_t{70});
    ::operator delete[](::operator new[](70, std::align_val_t{128}), std::size_t{70}, std::align_val_t{128});
    ::operator delete[](::operator new[](70, std::align_val_t{128}), std::align_val_t{128});
    ::operator delete(::operator new(40), std::size_t{40});
    ::operator delete(::operator new(40, std::align_val_t{64}), std::size_t{40}, std::align_val_t{64});
    std::map<int, std::string> words;
    auto fill = [](int from) {
        std::vector<std::string> all;
        for (int i = from; i < from + 20000; i++) all.push_back(std::to_string(i) + " and more than fits in place");
        return all;
    };
    std::vector<std::string> one, two;
    std::thread first([&] { one = fill(0); }), second([&] { two = fill(20000); });
    first.join();
    second.join();
    for (auto const &word : one) words[std::atoi(word.c_str())] = word;
    for (auto &word : two) words[std::atoi(word.c_str())] = std::move(word);
    CHECK(words.size() == 40000 && words[39999].rfind("39999", 0) == 0);
    std::puts("done");
}
